"""Labelled pictures of clocks in a folder: the layouts that are read, and what is left out of them and why."""

import collections
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train.exits import DataError
from train.image_files import ImageError, read_image
from train.tasks.base import Example
from train.tasks.left_out import CountingBuilder, count_reasons, notes_on, refuse_beyond
from train.tasks.prepared import Record, RecordConfig, RecordSource, prepare_builder
from train.tasks.published import digest_or_none

# Raised whenever the same folder would give other records, so that data prepared earlier are never reused.
CLOCK_FILES_VERSION = 2
LABELS = "labels.jsonl"
SPLIT_FOLDERS = ("train", "test")
# Pictures for validation belong to neither split.
_SPLITS = (*SPLIT_FOLDERS, "val", "valid", "validation", "dev")
_TIME_FOLDER = re.compile(r"(?P<hour>[0-9]{1,2})[-_:.](?P<minute>[0-9]{2})", re.ASCII)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp")
_NO_TIME, _NO_FILE, _NO_ROW = "no single time", "image file is missing or not readable", "line is no object with a file"
_NO_SPLIT = f"split is none of {', '.join(_SPLITS)}"
_TWICE, _TWO_TIMES = "listed a second time", "listed with different times"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Photo:
    """One labelled picture.

    Args:
      name: the file as the folder names it; of a line that names none, the line.
      path: where it is; None: a line that names none.
      split: "train", "test", or another that is read for neither.
      time: what it shows as H:MM, hours 1 to 12; None: its label states no single time.
      fault: what is wrong with its label otherwise; such a picture is counted in every split.
    """

    name: str
    path: Path | None
    split: str
    time: str | None
    fault: str = ""


class ClockPhotos(CountingBuilder):
    """Pictures of clocks with the times they show, from a folder of the user's; the pictures stay where they are."""

    FIELDS = ("file", "sha256", "time")


@dataclasses.dataclass(eq=False, kw_only=True)
class PhotoReader:
    """The good pictures of a split as records, and why the others are none.

    Args:
      path: the folder or file of labels that the pictures come from.
      photos: of the split, in order.
      digests: name -> SHA-256 of every file that can be read.
      taken: digests of pictures that belong to another split.

    Attributes:
      bad: reason -> names, of the last reading.
    """

    path: Path
    photos: Sequence[Photo]
    digests: dict[str, str]
    taken: frozenset[str] = frozenset()
    bad: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Iterator[Record]:
        self.bad = collections.defaultdict(list)
        for photo in self.photos:
            reason = self._fault(photo)
            if reason:
                self.bad[reason].append(photo.name)
            else:
                yield {"file": photo.name, "sha256": self.digests[photo.name], "time": photo.time}

    def left_out(self) -> dict[str, Any]:
        """Describe the last reading for JSON."""
        return count_reasons(self.bad, total=len(self.photos), unit="picture")

    def _fault(self, photo: Photo) -> str:
        if photo.fault:
            return photo.fault
        if photo.time is None:
            return _NO_TIME
        if photo.name not in self.digests:
            return _NO_FILE
        if self.digests[photo.name] in self.taken:
            return "picture of the test split"
        try:
            read_image(photo.path.read_bytes())
        except ImageError as error:
            return error.reason
        return ""


def find_photos(place: Path) -> list[Photo]:
    """List the pictures of a folder with their labels, in one of two layouts.

    - A file of labels (``labels.jsonl`` of the folder, or the file itself as `place`): one object a line with ``file``,
      relative to it, ``hour`` and ``minute`` or ``time``, and ``split`` perhaps; without it a picture is for the test.
    - ``train/H-MM/`` and ``test/H-MM/`` with the pictures that show H:MM, as in the set TIME of Kaggle.

    Raises:
      DataError: no such place, or neither layout.
    """
    labels = place if place.is_file() else place / LABELS
    if labels.is_file():
        return _from_labels(labels)
    folders = [place / split for split in SPLIT_FOLDERS if (place / split).is_dir()]
    photos = [photo for folder in folders for photo in _from_folders(folder, place)]
    if not photos:
        raise DataError(
            f"clock: {place} has no pictures: --data_dir is a folder with {LABELS}, such a file itself, or a folder "
            "with train/H-MM and test/H-MM, which hold the pictures that show H:MM."
        )
    return photos


def read_time(row: dict[str, Any]) -> str | None:
    """Read the label of a picture: ``time`` as H:MM, or whole numbers ``hour`` (0 to 23) and ``minute``.

    Example:
      >>> read_time({"hour": 15, "minute": 5}), read_time({"time": "0:30"}), read_time({"hour": 3, "minute": [4, 5]})
      ('3:05', '12:30', None)
    """
    text = row.get("time")
    match = _TIME_FOLDER.fullmatch(text) if isinstance(text, str) else None
    hour, minute = (int(match["hour"]), int(match["minute"])) if match else (row.get("hour"), row.get("minute"))
    if type(hour) is not int or type(minute) is not int or not (0 <= hour <= 23 and 0 <= minute <= 59):
        return None
    return f"{(hour - 1) % 12 + 1}:{minute:02d}"


def make_photo_source(
    split: str,
    prompt: str,
    *,
    data_dir: str | None,
    max_bad: int | None = None,
    prepare_in: str | None = None,
    form: str,
) -> RecordSource:
    """Open a split of a folder of labelled pictures; the pictures are read when they are asked for.

    A picture is left out, counted by reason, if its label states no single time or an unknown split, if it is listed
    twice, if it cannot be read (see `train.image_files.read_image`), or, in "train", if the same file is in "test" too.

    Args:
      split: "train" or "test".
      prompt: of every example.
      data_dir: see `find_photos`; None is refused.
      max_bad: refuse the folder when more pictures are bad; None leaves out any number.
      prepare_in: folder of prepared data; None is `default_data_dir()`.
      form: of the prompt; part of the fingerprint.

    Raises:
      DataError: no folder, no good picture for the split, or too many bad ones.
    """
    if not data_dir:
        raise DataError("clock: give --data_dir=FOLDER with pictures of clocks and their labels.")
    place = Path(data_dir)
    photos = find_photos(place)
    digests = {photo.name: found for photo in photos if photo.path and (found := digest_or_none(photo.path))}
    test = (photo for photo in photos if photo.split == "test" and photo.time and split == "train")
    taken = {digests[photo.name] for photo in test if photo.name in digests}
    own = _told_once([photo for photo in photos if photo.split == split or photo.fault])
    reader = PhotoReader(path=place, photos=own, digests=digests, taken=frozenset(taken))
    if max_bad is not None:  # before anything is written
        for _ in reader():
            pass
        refuse_beyond(place, reader.left_out(), max_bad)
    parts = (CLOCK_FILES_VERSION, [(photo.name, photo.time, digests.get(photo.name)) for photo in own], sorted(taken))
    name = f"photos-{split}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
    builder = prepare_builder(ClockPhotos, RecordConfig(name=name, records={split: reader}), data_dir=prepare_in)
    left_out = builder.info.metadata[f"{split}_left_out"]
    paths = {photo.name: photo.path for photo in own if not photo.fault}

    def make_example(index: int, record: Record) -> Example:
        image = paths[record["file"]].read_bytes()
        return Example(key=record["file"], prompt=prompt, answer=record["time"], image=image)

    notes = notes_on(place, left_out)
    return RecordSource(builder, split, make_example, form=form, notes=notes)


def _from_labels(labels: Path) -> list[Photo]:
    photos = []
    with open(labels, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
                path = labels.parent / row["file"]
                split, time = row.get("split", "test"), read_time(row)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                photos.append(Photo(name=f"line {number}", path=None, split="", time=None, fault=_NO_ROW))
                continue
            fault = "" if isinstance(split, str) and split in _SPLITS else _NO_SPLIT
            photos.append(Photo(name=row["file"], path=path, split="" if fault else split, time=time, fault=fault))
    return photos


def _from_folders(folder: Path, place: Path) -> Iterator[Photo]:
    """Every file in a folder named by a time counts; in other folders images alone, and hidden files nowhere."""
    for path in sorted(folder.rglob("*")):
        time = read_time({"time": path.parent.name})
        is_meant = time is not None or path.suffix.lower() in _SUFFIXES
        if is_meant and not path.name.startswith(".") and path.is_file():
            yield Photo(name=path.relative_to(place).as_posix(), path=path, split=folder.name, time=time)


def _told_once(photos: list[Photo]) -> list[Photo]:
    """Mark what is listed again: of several times for one picture none can be trusted, of one time the first line is
    enough. "a.png" and "./a.png" are one picture."""
    place_of = lambda photo: os.path.normpath(photo.path) if photo.path else photo.name
    times: dict[str, set[str]] = collections.defaultdict(set)
    for photo in photos:
        if photo.time and not photo.fault:
            times[place_of(photo)].add(photo.time)
    seen: set[str] = set()
    told = []
    for photo in photos:
        fault = _TWO_TIMES if len(times[place_of(photo)]) > 1 else _TWICE if place_of(photo) in seen else ""
        told.append(photo if photo.fault or not fault else dataclasses.replace(photo, fault=fault))
        if not photo.fault:
            seen.add(place_of(photo))
    return told
