"""Image files: folders of classes, of the user or of a named set in its original layout."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pubsel.data.convert import Shape
from pubsel.data.delimited import HEAD_LINES, rows_of
from pubsel.data.examples import MANY, NOT_KNOWN, folded, people_of
from pubsel.data.findings import ERROR, NOTE, WARNING, Finding, first_of
from pubsel.data.images import MOST, SUFFIXES, alike, dicom_tag, is_dicom, unread
from pubsel.data.splits import SEED, Listed, Listing, Unread, group_of, held_out, missing, stamp
from pubsel.messages import UsageError, UserError
from pubsel.settings.datasets import Dataset
from pubsel.settings.keys import Read

TRAIN, TEST, VALIDATION = ("train", "training"), ("test", "testing"), ("val", "valid", "validation", "dev")
NAMED = 3  # folders that a message names
TEST_FRACTION = 0.2  # of the images, or units, that are held out where nobody gives a test part
TABLES = (".csv", ".tsv", ".parquet")
SURROGATES = frozenset(map(chr, range(0xDC80, 0xDD00)))  # bytes of a name that are not UTF-8, as Python has them
PARTS = (*TRAIN, *TEST, *VALIDATION)
OF_PERSON = r"(?<![a-z])(patient|person|subject|participant|subj?|pat)[_-]?\d+"  # in the name of a file or folder
NUMBERED = r"(?!(19|20)\d{6}$)[a-z]*[_-]?\d+"  # as of a folder of somebody, and no date
FEW_PEOPLE = 9  # or fewer are no people, as the cameras of a set, without a word such as patient
NO_CLASSES = {"unsup", "unsupervised", "unlabeled", "unlabelled", *"masks thumbnails thumbs annotations".split()}
FOLDS = r"(k?fold|split)s?[ _-]?\d+"  # folders of a cross-validation
LIKE_TEST = (*TEST, *VALIDATION, "eval", "evaluation", "holdout")
FILLERS = frozenset("set data dataset image images img imgs split part folder samples".split())  # as in train_images


def read(name: str, info: Dataset, root: Path, download: bool) -> Listing:
    """Return a named set from its class folders <root>/<options.folder>/<class>/*, brought to the shape in
    conf/dataset.

    `options.test` is the share held out for testing, whole groups at a time: `options.group` is a pattern whose match
    in a file name names the group (a patient). Or `options.parts` names the publisher's own parts, such as {train:
    [train, val], test: [test]}: sub-folders with class folders, all with the same classes. Missing if the folder, or
    all of a part, is not there.
    """
    folder = root / info.options["folder"]
    if not folder.is_dir():
        raise missing(name, root)
    if "parts" in info.options:
        return Listing(_published(name, info, root, "train"), _published(name, info, root, "test"))

    # Images of one patient belong together, so whole groups are held out.
    paths, labels = labelled(folder, expected_classes(folder, info))
    fraction, pattern = info.options["test"], info.options.get("group")
    groups = [group_of(f"{path.parent.name}/{path.name}", pattern) for path in paths]
    y, unit = torch.from_numpy(labels), "patient" if pattern else ""
    note = f"{name}: {fraction:.3g} of the images held out as the test set, seed {SEED}"
    return drawn_parts(name, paths, y, groups, fraction, info.image_shape, unit)._replace(notes=(note,))


def _published(name: str, info: Dataset, root: Path, part: str) -> Unread:
    """Return the images of the sub-folders that `options.parts` gives for a part; all but the first may be absent."""
    top, parts = root / info.options["folder"], info.options["parts"]
    first, *others = (top / folder for folder in parts[part])
    if not first.is_dir():
        raise missing(name, root, f"no folder {first.relative_to(root)}")

    # The same classes in each folder, or their numbers would differ.
    folders = [first, *(folder for folder in others if folder.is_dir())]
    classes = expected_classes(top / parts["train"][0], info)
    for folder in folders:
        if class_folders(folder) != classes:
            raise UserError(f"{folder}: not the class folders of {parts['train'][0]}: unpack the archive again")

    examples = [labelled(folder, classes) for folder in folders]
    files = [path for paths, _ in examples for path in paths]
    labels = torch.from_numpy(np.concatenate([labels for _, labels in examples]))
    return unread(files, labels, info.image_shape)


class Layout(NamedTuple):
    """The places of the images of a user's folder."""

    train: Path  # contains class folders, or images
    held: tuple[Path, ...]  # the test part, and the validation part, which is one with it
    classes: list[str]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]


def layout(folder: Path, people: bool = False) -> Layout:
    """Return the parts of a user's folder by their names, in any case. people: class folders contain a folder for each
    person. UserError if it is absent."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    within = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_dir() and not hidden(path.name)}

    def named(names: Sequence[str]) -> Path | None:
        return next((within[name] for name in names if name in within and any(_images_below(within[name]))), None)

    # A class may be called train: then it has images, and so have folders next to it.
    train, *held = (named(names) for names in (TRAIN, TEST, VALIDATION))
    others = [path for name, path in within.items() if name not in PARTS]
    if train is None or (not class_folders(train, people) and any(_has_images_of(path, people) for path in others)):
        train, held = folder, []
    classes = class_folders(train, people)
    findings = list(_lost(folder, train, classes))
    if train == folder and (parts := [name for name in classes if name.lower() in (*TEST, *VALIDATION)]) and others:
        text = f"{folder.name}: {parts[0]} is next to class folders, and would be a class"
        findings.append(Finding("split", ERROR, text, "put the other classes into train, or move this folder"))
    elif named_alike := _like_parts([path.name for path in within.values()], train == folder):
        text = f"{folder.name}: {' and '.join(named_alike)} have names like parts, and are not read as such"
        findings.append(Finding("split", ERROR, text, "rename them train and test"))

    # images without classes, as a competition's test part has them, cannot be tested on
    kept = list[Path]()
    for part in [part for part in held if part is not None]:
        if not classes or class_folders(part, people):
            kept.append(part)
            continue
        text = f"{folder.name}: {part.name} has {len(all_images(part))} images without classes, which are not read"
        findings.append(Finding("not_read", WARNING, text, "give them to pubsel predict"))
    notes = tuple(
        f"{folder.name}: {part.name} is used as the test set" for part in kept if part.name.lower() not in TEST
    )
    return Layout(train, tuple(kept), classes, notes, tuple(findings))


def words_in(text: str) -> set[str]:
    """Return the words of the name of a folder or column, such as test and x of TestSet_x: in lower case, without those
    that say nothing about its content."""
    words = re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", text).casefold())
    return {re.sub("(?<=[a-z])(set|data|images?)$", "", word) for word in words if word not in FILLERS}


def _like_parts(names: Iterable[str], classes: bool) -> list[str]:
    """Return two folders whose names differ in train and test alone, such as trainset and testset, unless they are the
    names of parts. classes: they would be read as classes, whatever else is in their names."""
    sides, rest = [{*TRAIN}, {*LIKE_TEST}], dict[frozenset[str], list[str]]()
    for name in names:
        rest.setdefault(frozenset(words_in(name).difference(*sides)), []).append(name)
    for other, named in rest.items():
        pair = [next((name for name in named if words_in(name) & side), None) for side in sides]
        if None not in pair and not {str(name).lower() for name in pair} <= {*PARTS} and (classes or not other):
            return [str(name) for name in pair]
    return []


def _lost(folder: Path, train: Path, classes: Sequence[str]) -> tuple[Finding, ...]:
    """Return the findings on folders without an image that is read, whose class would be missing, on hidden folders,
    and on a table next to images without classes."""
    findings = [*lost_classes(folder, train, classes, "images")]
    tables = [path for path in train.iterdir() if path.suffix.lower() in TABLES]
    if tables and len(classes) < 2:
        text = f"{folder.name}: {tables[0].name} is next to images without classes"
        remedy = f"if it has their labels, give {tables[0]}"
        findings.append(Finding("table", WARNING, text, remedy))
    for table in [path for path in tables if _labels_folders(path, classes)]:
        text = f"{folder.name}: {table.name} has a label for each class folder ({first_of(classes)})"
        findings.append(Finding("labels", ERROR, text, "make these <class>/<person>/* by it, and set unit=folder"))
    others = sorted(path for path in train.iterdir() if path.is_dir() and hidden(path.name))
    concealed = [path.name for path in others if any(_images_below(path))]
    if concealed:
        text = f"{folder.name}: hidden folders are no classes and are not read: {first_of(concealed, NAMED)}"
        findings.append(Finding("hidden", NOTE, text))
    return tuple(findings)


def _labels_folders(table: Path, classes: Sequence[str]) -> bool:
    """Return whether a table names nine tenths of the class folders in one column, and has at most half as many labels
    in another."""
    try:
        rows = rows_of(table, (), ",;\t", most=MANY * len(classes) + 1)
    except UserError:  # no table of text, or none that is read
        return False
    values = {column: {folded(row[column]) for row in rows} for column in rows[0]}
    named = [column for column in values if len(values[column] & {*map(folded, classes)}) >= MOST * len(classes)]
    labels = [column for column in values if words_in(column) & {"label", "class", "target", "diagnosis", "category"}]
    return bool(named) and any(2 * len(values[column]) <= len(classes) for column in labels)


def lost_classes(folder: Path, train: Path, classes: Sequence[str], what: str) -> tuple[Finding, ...]:
    """Return the finding on folders next to those of the classes without images or texts (`what`) that are read, whose
    class would be missing. train: of the training part."""
    others = sorted(path for path in train.iterdir() if path.is_dir() and path.name not in classes)
    lost = [path for path in others if not hidden(path.name) and (train != folder or path.name.lower() not in PARTS)]
    if not lost or not classes:
        return ()
    inside = [sorted(file.suffix for file in path.rglob("*") if file.is_file()) for path in lost]
    why = [f"{path.name} ({first_of(suffixes, 2) or 'empty'})" for path, suffixes in zip(lost, inside, strict=True)]
    text = f"{folder.name}: {len(lost)} class folders without {what} that are read: {first_of(why, NAMED)}"
    remedy = f"move {what} to <class>/*, convert them, or remove these folders"
    return (Finding("class_lost", ERROR, text, remedy),)


def list_folder(folder: Path, unit: str | None, read: Read) -> Listed:
    """Return what is in a user's image folder: folder/train/<class>/* and folder/test/<class>/*, or
    folder/<class>/*, or a flat folder of images (one class: public data, or ranking, only).

    The validation part (val, valid, validation, dev) is one with the test part: nobody in it may be trained on, whether
    or not there is a test part. Without either, a fifth is drawn. A finding counts the images that are not read. Size
    and colour are those of nine tenths (`alike`). unit: "folder" for folder/<class>/<person>/*; or a tag of DICOM
    files, such as PatientID; a person may be in several classes. UserError for a folder that is absent or empty, a name
    that is not UTF-8, or a class without training images; UsageError for a unit that the folder does not have.
    """
    people = unit == "folder"
    tag = None if people else unit  # of DICOM files
    if tag and not all(map(is_dicom, all_images(folder))):
        raise UsageError(
            f"unit={unit}: {folder} is a folder: set unit=folder, for <class>/<person>/*; a tag such as "
            "PatientID names the people of DICOM files"
        )
    places = layout(folder, people)
    top, classes = places.train, places.classes
    _check_places(folder, places, people)

    # The user's own test part has the same classes.
    paths, labels = labelled(top, classes, people)
    test, n = None, len(paths)
    for part in places.held:
        unknown = sorted(set(class_folders(part, people)) - set(classes))
        if unknown:
            raise UserError(f"{part}: class {unknown[0]} is not in {top}: give both the same classes")
        part_paths, part_labels = labelled(part, classes, people)
        paths, labels = paths + part_paths, np.concatenate([labels, part_labels])
        test = np.arange(len(labels)) >= n

    unnamed = next((path for path in paths if not SURROGATES.isdisjoint(str(path))), None)
    if unnamed is not None:
        raise UserError(f"{folder}: the name of {str(unnamed.relative_to(folder))!a} is not UTF-8: rename it")
    keys = [] if unit is None else [dicom_tag(path, tag) if tag else path.parent.name for path in paths]
    findings = [*places.findings, *same_words(folder, classes, keys if people else ())]
    findings += _unread(folder, paths, [places.train, *places.held])
    findings += about_copies(folder.name, paths)
    findings += [] if unit else about_patients(folder.name, paths, [path.name for path in paths], len(classes))
    listed = Listed(
        y=torch.from_numpy(labels.astype(np.int64)),
        test=test,
        classes=max(1, len(classes)),
        files=tuple(map(stamp, paths)),
        images=lambda: alike(folder, paths, read),
        names=tuple(path.relative_to(folder).as_posix() for path in paths),
        notes=places.notes,
        class_names=tuple(classes),
        shuffle=True,
        findings=tuple(findings),
    )
    if unit is None:
        return listed
    whose, about_people = people_of(folder.name, keys)
    return listed._replace(people=whose, findings=(*findings, *about_people))


def _check_places(folder: Path, places: Layout, people: bool) -> None:
    """Raise UserError if images are not where they are expected."""
    if people and not places.classes:
        raise UserError(f"{folder}: unit=folder needs <class>/<person>/*, and has no such images: move them")
    if not places.classes and not images_in(places.train) and (deeper := all_images(places.train)):
        if parts := [finding for finding in places.findings if finding.name == "split"]:
            raise UserError(parts[0].line())
        first = deeper[0].relative_to(folder).as_posix()
        what = f"its {len(deeper)} images lie deeper than <class>/*, such as {first}"
        raise UserError(f"{folder}: {what}: {_moved(places.train, deeper)}")


def _moved(train: Path, deeper: Sequence[Path]) -> str:
    """Return what to do with images that lie deeper than <class>/*. As people's names are no secret where they are
    taken for classes, unit=folder is advised only where the outer folders may be the classes."""
    outer, inner = {path.parent.parent for path in deeper}, sorted({path.parent.name for path in deeper})
    if len(outer) == 1:
        return f"give {deeper[0].parent.parent}, or move them up"
    if any(top.parent != train for top in outer):
        return "move them up, to <class>/*, or those of people to <class>/<person>/* with unit=folder"
    if any(name.lower() in PARTS for name in inner):
        return "make them train/<class>/* and test/<class>/*"
    if len(inner) < len(outer):
        return f"if {first_of(inner)} are classes, make them <class>/<person>/* and set unit=folder"
    return f"if each inner folder, such as {deeper[0].parent.name}, is of a person, set unit=folder; or move them up"


def same_words(folder: Path, classes: Sequence[str], people: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Return the finding on class folders whose names are no classes, or differ in case or blanks alone, or that may be
    people. people: the folders in them of all examples, if these are of people."""
    if people and len({*people}) < len(classes):
        text = f"{folder.name}: {len(classes)} folders of classes ({first_of(classes)}) have fewer of people in them"
        remedy = f"if the classes are {first_of(people)}, make them <class>/<person>/*"
        return (Finding("labels", ERROR, text, remedy),)
    words = {*map(folded, classes)}
    masks = {"mask"} if words & {"image", "images", "img", "imgs"} else set()  # alone, a class of faces
    if unlabelled := [name for name in classes if folded(name) in NO_CLASSES | masks]:
        text = f"{folder.name}: {unlabelled[0]} is read as a class, and has the name of no class"
        return (Finding("labels", ERROR, text, "move it elsewhere; examples without labels may be public data"),)
    if len(classes) > 1 and (words <= {*PARTS} or all(re.fullmatch(FOLDS, word) for word in words)):
        text = f"{folder.name}: {' and '.join(classes)} are read as classes, and have the names of parts"
        return (Finding("labels", ERROR, text, "make them train/<class>/* and test/<class>/*, or rename them"),)
    whose = [name for name in classes if re.search(OF_PERSON, name.lower())]
    if len(whose) >= max(2, MOST * len(classes)):
        text = f"{folder.name}: {len(classes)} class folders have names of people: {first_of(whose)}"
        remedy = "make them <class>/<person>/* and set unit=folder, or give a table with path, label and their column"
        return (Finding("labels", ERROR, text, remedy),)
    alike_of = dict[str, list[str]]()
    for name in classes:
        alike_of.setdefault(folded(name), []).append(name)
    several = [names for names in alike_of.values() if len(names) > 1]
    if not several:
        return ()
    text = f"{folder.name}: class folders {first_of(map(repr, several[0]), 3)} differ in how they are written alone"
    return (Finding("labels", ERROR, text, "make them one folder"),)


def about_patients(
    name: str, paths: Sequence[object], files: Sequence[str], classes: int, remedy: str = "set unit=PatientID"
) -> Iterator[Finding]:
    """Yield the findings on images that may be of people: the first DICOM files of `paths`, several of which are of one
    patient, or names of files (`about_names`)."""
    patients = list[str]()
    for path in paths[:HEAD_LINES]:
        with contextlib.suppress(UserError):  # of a file that cannot be read, which is named later
            patients += [dicom_tag(path, "PatientID")] if isinstance(path, Path) and is_dicom(path) else []
    known = [patient for patient in map(folded, patients) if patient not in NOT_KNOWN]
    if 1 < len({*known}) < len(known):
        text = f"{name}: {len(known)} DICOM images are of {len({*known})} patients"
        yield Finding("ids", ERROR, text, f"{remedy}, or an image is protected, not a person")
    else:
        yield from about_names(name, files, classes)


def about_copies(name: str, files: Sequence[Path]) -> Iterator[Finding]:
    """Yield the finding on files if a tenth of them or more have another one next to them, called alike with a mark and
    more after it, as masks and copies are. name: of their folder."""
    stems = {file.parent / file.stem for file in files}
    starts = {file: [file.stem[: mark.start()] for mark in re.finditer(r"[\W_]", file.stem)] for file in files}
    pairs = [(file, start) for file in files for start in starts[file] if start and file.parent / start in stems]
    if len({file.parent / start for file, start in pairs}) > max(1, (1 - MOST) * len(files)):
        (file, start), count = pairs[0], len({file for file, _ in pairs})
        text = f"{name}: {count} files have the name of another one with more after it, such as {file.name} of {start}"
        remedy = "move masks and copies elsewhere; accepted, each counts as an example"
        yield Finding("copies", ERROR, text, remedy)


def about_names(name: str, files: Sequence[str], classes: int) -> Iterator[Finding]:
    """Yield the finding on names of files, with folders in a table, that may be of people: half of them have a word
    such as patient and a number, nine tenths share with others what is before the last _ or -, or some, but not many,
    share the number before the first one, or of a folder. name: of their folder or table."""
    parts, n = [re.split(r"[\\/]", file.lower()) for file in files], len(files)
    stems, word = [Path(each[-1]).stem for each in parts], re.compile(OF_PERSON)
    # the last one: folders above those of a table may be of somebody too
    people = Counter(whose[-1][0] for file in files if (whose := [*word.finditer(file.lower())]))
    numbers = [[*each[:-1], re.split("[_-]", stem)[0]] for each, stem in zip(parts, stems, strict=True)]
    levels = [Counter(filter(re.compile(NUMBERED).fullmatch, level)) for level in zip_longest(*numbers, fillvalue="")]
    ways = [(people, 2 * people.total() >= n and len(people) < people.total(), 2)]
    for keys in (Counter(re.split("[_-](?!.*[_-])", stem)[0] for stem in stems), *levels):
        shared = sum(count for count in keys.values() if count > 1) >= MOST * n and 2 * len(keys) <= n
        ways.append((keys, shared and (len(ways) == 1 or n <= MANY * len(keys)), max(2 * classes, FEW_PEOPLE)))
    for keys, are, least in ways:
        if are and len(keys) > least:
            text = f"{name}: names of files may say whose they are: {len(keys)}, such as {first_of(keys)}"
            remedy = "if these are people, give a table with path, label and a column of them, and set unit=COLUMN"
            yield Finding("ids", WARNING, text, remedy)
            return


def _unread(folder: Path, paths: Sequence[Path], parts: Sequence[Path]) -> tuple[Finding, ...]:
    """Return the findings on files of a folder that are not among `paths`: images next to its parts or deeper than its
    classes, and files of other kinds."""
    read = set(paths)
    left = sorted(path for path in _images_below(folder) if path not in read)
    findings = list[Finding]()

    def place(path: Path) -> str:
        within = any(path.is_relative_to(part) for part in parts)
        relative = path.parent.relative_to(folder)
        return relative.as_posix() if within or not relative.parts else relative.parts[0]

    if left:
        counts = [f"{count} in {where}" for where, count in Counter(map(place, left)).most_common()]
        text = f"{folder.name}: {len(left)} images are not read: {first_of(counts, NAMED)}"
        findings.append(Finding("not_read", WARNING, text))
    return (*findings, *other_files(folder, _is_image))


def other_files(folder: Path, is_read: Callable[[Path], bool]) -> tuple[Finding, ...]:
    """Return the finding on files of a folder that are not of the kind that is read."""
    other = Counter(path.suffix.lower() or "without extension" for path in files_below(folder) if not is_read(path))
    counts = [f"{count} {suffix}" for suffix, count in other.most_common()]
    text = f"{folder.name}: {other.total()} files are not read: {', '.join(counts)}"
    return (Finding("not_read", WARNING, text),) if other else ()


SYSTEM_NAMES = "__macosx @eadir thumbs.db desktop.ini $recycle.bin lost+found __pycache__ dicomdir".split()


def hidden(name: str) -> bool:
    """Return whether a file or folder is no part of the data: hidden, or made by a system or an archive."""
    return name.startswith(".") or name.lower() in (*SYSTEM_NAMES, "system volume information")


def all_images(folder: Path) -> list[Path]:
    """Return the image files of a folder and of all folders in it, sorted; hidden ones are left out."""
    return sorted(_images_below(folder))


def _images_below(folder: Path) -> Iterator[Path]:
    """Yield what `all_images` returns, in any order."""
    return (path for path in files_below(folder) if _is_image(path))


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of all folders in it, in any order, but for hidden ones and for what is no file:
    opening a pipe or a socket would wait for ever. A link is followed once."""
    seen = set[tuple[int, int]]()
    for top, inner, files in os.walk(folder, followlinks=True):
        here, stat = Path(top), os.stat(top)
        if (stat.st_dev, stat.st_ino) in seen:
            inner[:] = []
            continue
        seen.add((stat.st_dev, stat.st_ino))
        inner[:] = [name for name in inner if not hidden(name)]
        yield from (path for name in files if not hidden(name) and (path := here / name).is_file())


def _is_image(path: Path) -> bool:
    """Return whether a file has the name of an image, or has another name and is DICOM; hidden files are none."""
    named = os.path.splitext(path.name)[1].lower() in SUFFIXES and not path.is_dir()
    return not hidden(path.name) and (named or is_dicom(path))


def _has_images_of(folder: Path, people: bool) -> bool:
    """Return whether `images_of` returns any, and raise what it raises."""
    if people:
        return bool(images_of(folder, True))
    with os.scandir(folder) as entries:
        return any(_is_image(folder / entry.name) for entry in entries)


def class_folders(folder: Path, people: bool = False) -> list[str]:
    """Return the names of the sub-folders with images, sorted; people: with folders of people that have images."""
    inside = [path for path in folder.iterdir() if path.is_dir() and not hidden(path.name)]
    return sorted(path.name for path in inside if _has_images_of(path, people))


def expected_classes(folder: Path, info: Dataset) -> list[str]:
    """Return the names of the class folders of a named set. UserError if they are not as many as conf/dataset says."""
    classes = class_folders(folder)
    if len(classes) != info.classes:
        raise UserError(f"{folder}: {len(classes)} class folders with images, {info.classes} expected: {info.title}")
    return classes


def images_in(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by name; hidden files are no images."""
    return [path for name in sorted(os.listdir(folder)) if _is_image(path := folder / name)]


def images_of(folder: Path, people: bool) -> list[Path]:
    """Return the image files of a class folder; people: of its folders, one for each person. UserError if
    images are next to these folders."""
    if not people:
        return images_in(folder)
    persons = sorted(path for path in folder.iterdir() if path.is_dir() and not hidden(path.name))
    images = [image for person in persons for image in images_in(person)]
    if images and (loose := images_in(folder)):
        raise UserError(f"{folder}: {loose[0].name} is next to the folders of people: move it into its person's folder")
    return images


def labelled(folder: Path, classes: Sequence[str], people: bool = False) -> tuple[list[Path], np.ndarray]:
    """Return the image files of the class folders in order of class and name, with labels [n]; or, of a flat folder
    without classes, all its images with label 0. UserError if there are none, or if images lie next to class folders.
    """
    # an image next to class folders has no label
    loose = images_in(folder)
    if classes and loose:
        raise UserError(f"{folder}: {loose[0].name} lies beside class folders: move it into its class")

    folders = [folder / name for name in classes]
    groups = [images_of(path, people) if path.is_dir() else [] for path in folders] or [loose]
    paths = [path for group in groups for path in group]
    if not paths:
        raise UserError(f"{folder}: no images in it: expected <class>/*.png (or jpg, ...), or images")
    return paths, np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def drawn_parts(
    name: str, paths: Sequence[Path], y: Tensor, groups: Sequence[str], fraction: float, shape: Shape, unit: str = ""
) -> Listing:
    """Return both parts of a named set from image files with labels [n] or [n, labels]: a fraction is held out for
    testing, whole groups [n] at a time, and a note counts it. unit: what a group is, such as patient; "": an image."""
    test = held_out(groups, fraction)

    def part(mask: np.ndarray) -> Unread:
        places = np.flatnonzero(mask).tolist()
        people = [groups[i] for i in places] if unit else ()
        return unread([paths[i] for i in places], y[torch.from_numpy(mask)], shape, people)

    how = f", disjoint by {unit}" if unit else ""
    note = f"{name}: {int(test.sum())} of {len(test)} images held out as the test set{how}, seed {SEED}"
    return Listing(part(~test), part(test), (note,), unit)


def same_images(table: Path, rows: Collection[str], folder: Path, files: Collection[str]) -> None:
    """Raise UserError if a table names an image that its folder lacks, or the folder has one without a row."""
    there, named = set(files), set(rows)
    if absent := [row for row in rows if row not in there]:
        raise UserError(f"{folder}: {absent[0]} and {len(absent) - 1} more of {table.name} are absent: unpack it again")
    if extra := sorted(there - named):
        raise UserError(
            f"{table}: no row for {extra[0]} and {len(extra) - 1} more of {folder}: take both from one release"
        )
