"""Share of a linear separator in the top principal components: PILLAR, Definition 3 and Figure 3
(Pinto, Hu, Yang, Sanyal, SaTML 2024, arXiv:2306.03962). No privacy: for public data, or to explain a result."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.svm import LinearSVC

from pubsel.messages import UsageError


def separability(x: ArrayLike, y: ArrayLike, ks: Sequence[int], c: float = 1e3) -> NDArray[np.float64]:
    """Return xi_k = 1 - ||A_k A_k^T w*||_2 for each of ks, [len(ks)]: 0 if the separator lies in the top k components,
    1 if it is orthogonal to them.

    x: [n, d] features, whose rows are scaled to norm 1. y: [n], two classes. ks: from 0 to d.
    w*: the linear SVM through the origin, scaled to norm 1, with penalty `c` for errors (large: a hard margin).
    A_k: the top k eigenvectors of the second moment x^T x / n, which is not centred.
    UsageError for more than two classes, or a k that is out of range.
    """
    x = np.array(x, dtype=np.float64)
    if len(np.unique(y)) != 2 or not all(0 <= k <= x.shape[1] for k in ks):
        raise UsageError(f"separability: needs two classes, and each k from 0 to {x.shape[1]}")
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    svm = LinearSVC(C=c, fit_intercept=False, dual="auto", max_iter=100_000, random_state=0).fit(x, y)
    w = svm.coef_[0] / np.linalg.norm(svm.coef_[0])
    directions = np.linalg.svd(x, full_matrices=False)[2]  # [min(n, d), d], eigenvectors of x^T x; w lies in their span
    kept = np.cumsum((directions @ w) ** 2)
    kept = np.concatenate([[0.0], kept, np.full(x.shape[1] - len(kept), kept[-1])])
    return 1 - np.sqrt(np.minimum(kept, 1))[list(ks)]
