"""Named sets that share images or classes, as conf/dataset says; of a user's own sets nothing is known but their
paths."""

from pathlib import Path

from pubsel.messages import UsageError
from pubsel.settings.datasets import dataset_info, dataset_names
from pubsel.settings.identity import is_path, same_path


def same_examples(first: str, second: str, data_root: str) -> bool:
    """Return whether two datasets have the same test examples: the same name or file, or sets that share them (svhn and
    svhn_extra; mnist and mnist_m, whose digits are the same)."""
    a, b = _named(first, data_root), _named(second, data_root)
    if a is None or b is None:
        return a is b and same_path(first, second)
    return dataset_info(a).options.get("same_test_as", a) == dataset_info(b).options.get("same_test_as", b)


def check_apart(private: str, public: str, data_root: str) -> None:
    """Raise UsageError if the public set has images of the private one in another split: private ones would be
    public."""
    named = [_named(name, data_root) for name in (private, public)]
    if None in named or same_examples(private, public, data_root):
        return
    if _images_of(str(named[0])) == _images_of(str(named[1])):
        raise UsageError(
            f"public={public} has images of {private} in another split, private ones among them: take {private} "
            "itself, or another set"
        )


def may_share(public: str, private: str, data_root: str) -> tuple[str, ...]:
    """Return the note that two named sets have images in common that no comparison of pixels finds."""
    known = [_named(name, data_root) for name in (public, private)]
    if None in known:
        return ()
    a, b = (_images_of(str(name)) for name in known)
    if b not in dataset_info(a).shares_images_with and a not in dataset_info(b).shares_images_with:
        return ()
    return (f"{public} and {private} share images, at other sizes: some public examples may be private ones",)


def _images_of(known: str) -> str:
    """Return the named set that the images of a named set come from."""
    info = dataset_info(known)
    return info.images_of or str(info.options.get("same_test_as", known))


def same_classes(name: str, private: str, data_root: str) -> bool:
    """Return whether labels of dataset `name` are of the private task. Of two named sets conf/dataset knows: the same
    examples, or `classes_of`; a user's own labels are what the user says they are."""
    public_set, private_set = _named(name, data_root), _named(private, data_root)
    if public_set is None:
        return True
    return private_set is not None and _classes_of(public_set) == _classes_of(private_set)


def _classes_of(known: str) -> str:
    first = dataset_info(known).options.get("same_test_as", known)
    return dataset_info(first).classes_of or str(first)


def class_names(name: str, data_root: str) -> tuple[str, ...]:
    """Return the names of the classes of a named set, in order, as conf/dataset has them; () if it has none."""
    known = _named(name, data_root)
    return () if known is None else tuple(dataset_info(_classes_of(known)).names or ())


def _named(name: str, data_root: str) -> str | None:
    """Return the file of conf/dataset that `name` means, also by the path of its npz in the data folder; None: a
    user's."""
    if not is_path(name):
        return name
    path = Path(name).expanduser().resolve()
    in_root = path.parent == Path(data_root).expanduser().resolve() and path.suffix == ".npz"
    return path.stem if in_root and path.stem in dataset_names() else None


def same_names(public: tuple[str, ...], private: tuple[str, ...]) -> bool:
    """Return whether two sets name the same classes. Numbers are no names: 3 may mean anything."""
    return public == private and any(not name.strip().isdecimal() for name in private)
