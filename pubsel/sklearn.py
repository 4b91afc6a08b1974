"""An estimator for scikit-learn's users: `PrivateClassifier`.

from pubsel.sklearn import PrivateClassifier

PrivateClassifier(epsilon=1.0).fit(X, y).score(X_test, y_test)
"""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from pubsel.data.findings import first_of
from pubsel.data.memory import strings_in, unwrapped
from pubsel.data.tables import label_words
from pubsel.estimator import Release, fit
from pubsel.messages import UserError
from pubsel.settings.keys import Fold

SEVERAL = (
    "each fit is a release of its data, and their epsilons add up, also those of cross_val_score and GridSearchCV: the "
    "ledger in {results!r} lists them (pubsel runs), where folds are different data sets: add them up"
)
# remedies that name an argument of `pubsel.fit` alone, as patterns
REMEDIES = {r"\bset unit=[^,;:]+": "give groups", r"\bset labels=fold, and they": "write them alike, and they"}


class PrivateClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear classifier with differential privacy, which has nothing to set but the guarantee (`pubsel.fit`).

    epsilon, delta: the guarantee for one row or text, or for one of `groups` with all its rows. public: other rows with
    the same columns, or other texts, (X, y) or X alone, or a list of these, one of which is chosen privately. bounds:
    [least, most] of all numbers, if these are public. scale: auto brings columns to one scale by a part of epsilon;
    none is for features of an encoder. public_labels: given if y of the public rows means the same. accept: findings
    that are no reason to stop. results: the folder with the ledger.
    A model that was fitted has `release_` (`Release`), which may be given away, and `classes_`.
    """

    _fits: ClassVar[int] = 0

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        public: Any = None,
        bounds: Sequence[float] | str | None = None,
        scale: str = "auto",
        public_labels: str = "auto",
        results: str = "results",
        accept: Sequence[str] = (),
    ):
        self.epsilon, self.delta, self.public, self.bounds = epsilon, delta, public, bounds
        self.scale, self.public_labels, self.results = scale, public_labels, results
        self.accept = accept

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows X [n, d], or texts X [n], with labels y [n]. groups: whose each row is, [n]; without it a row
        is protected. Missing numbers (NaN) are allowed. ValueError says what is wrong with the data."""
        if y is None:
            raise ValueError("PrivateClassifier requires y to be passed, but the target y is None")
        # a mask would be lost; a table keeps the names of its columns, which those of public tables are compared with
        X, y = (unwrapped(each) if isinstance(each, np.ma.MaskedArray) else each for each in (X, y))
        rows = X
        if strings_in(X) is None:
            X, y = validate_data(self, X, y, ensure_all_finite="allow-nan", accept_sparse=True, ensure_min_samples=2)
        check_classification_targets(y)
        labels = np.unique(y)
        if len(labels) < 2:
            raise ValueError(f"y has one class only, {y[0]!r}: the classifier needs two classes or more")
        words, _ = label_words(Path("y"), [{"y": str(label)} for label in labels], "y", Fold.apart)
        if unread := [label for label in labels.tolist() if str(label) not in words.numbers]:
            named = first_of(map(repr, unread), 4)
            raise ValueError(f"y: {named} would be no label, or several: call these classes by other words")

        PrivateClassifier._fits += 1
        if PrivateClassifier._fits == 2:
            warnings.warn(SEVERAL.format(results=self.results), stacklevel=2)
        try:
            self.release_: Release = fit(
                rows if hasattr(rows, "columns") else X, y, groups=groups, **self.get_params(deep=False)
            )
        except UserError as error:
            text = str(error)
            for remedy, ours in REMEDIES.items():
                text = re.sub(remedy, ours, text)
            raise ValueError(text) from None

        # probabilities have the classes in sorted order, as scikit-learn's are
        self.classes_ = labels
        self._order = [list(self.release_.classes).index(label) for label in self.classes_]
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each of `classes_`, [n, classes]."""
        check_is_fitted(self, "release_")
        rows = X = unwrapped(X) if isinstance(X, np.ma.MaskedArray) else X
        if strings_in(X) is None:
            X = validate_data(self, X, reset=False, ensure_all_finite="allow-nan", accept_sparse=True)
        return self.release_.predict_proba(rows if hasattr(rows, "columns") else X)[:, self._order]

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row, [n]."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.sparse = tags.non_deterministic = True
        tags.classifier_tags.poor_score = True  # of the few rows of a check
        return tags
