"""The two data sets as arrays: Criteo's Display Advertising layout and MovieLens 100k. No model, no training.

Every distinct value of a sparse feature, anywhere in the file, has a row of its own. A missing value is a value too.
So an id that first appears in the test rows reads its row's initial value. A store that derives initial values from
the key behaves in the same way."""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Hashable, Iterable, Sequence

import torch
from torch import Tensor

CRITEO_DENSE, CRITEO_SPARSE = 13, 26


@dataclass(frozen=True)
class Rows:
    """`ids`: (rows, columns) row numbers in the one shared table. A column belongs to one field; a field with
    several columns is mean-pooled. The last table row, number `table_rows - 1`, is padding and reads as zero.
    `dense`: (rows, dense features), already transformed. `label`: (rows,), 0 or 1."""

    ids: Tensor
    dense: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def take(self, index: Tensor | slice) -> Rows:
        return Rows(self.ids[index], self.dense[index], self.label[index])


@dataclass(frozen=True)
class Dataset:
    """`field_widths`: the number of id columns of each sparse field, in the order of the columns."""

    train: Rows
    valid: Rows
    test: Rows
    field_widths: tuple[int, ...]
    table_rows: int

    @property
    def dense_width(self) -> int:
        return self.train.dense.shape[1]


class Vocabulary:
    """Numbers (field, value) pairs in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def number(self, field: int, value: Hashable) -> int:
        return self._numbers.setdefault((field, value), len(self._numbers))

    def __len__(self) -> int:
        return len(self._numbers)


def open_text(path: Path, encoding: str = "utf-8") -> IO[str]:
    return gzip.open(path, "rt", encoding=encoding) if path.suffix == ".gz" else open(path, encoding=encoding)


def first_existing(folder: Path, names: Iterable[str]) -> Path:
    names = list(names)
    for name in names:
        for candidate in sorted(folder.glob(name)):
            return candidate
    raise SystemExit(f"no file like {' or '.join(names)} in {folder}: point --path at the folder that has it")


def log1p_dense(text: str) -> float:
    """log(1 + max(x, 0)); a missing value is 0."""
    return math.log1p(max(float(text), 0.0)) if text else 0.0


# --- Criteo ----------------------------------------------------------------------------------------------------------


def criteo(folder: Path, train_rows: int = 64_000, test_rows: int = 16_000, valid_rows: int = 8_000) -> Dataset:
    """The first `train_rows` rows are for training, the next `test_rows` rows for the test. `valid` is the last
    `valid_rows` training rows, and stays a part of `train`. To measure on it, train on the rows before it (see
    `without_valid`)."""
    vocabulary, ids, dense, label = Vocabulary(), [], [], []
    with open_text(first_existing(folder, ["*.tsv.gz", "*.tsv", "*.txt"])) as file:
        for _, cells in zip(range(train_rows + test_rows), csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)):
            label.append(float(cells[0]))
            dense.append([log1p_dense(text) for text in cells[1 : 1 + CRITEO_DENSE]])
            ids.append([vocabulary.number(field, text) for field, text in enumerate(cells[1 + CRITEO_DENSE :])])
    rows = Rows(torch.tensor(ids), torch.tensor(dense), torch.tensor(label))
    return Dataset(
        train=rows.take(slice(0, train_rows)),
        valid=rows.take(slice(train_rows - valid_rows, train_rows)),
        test=rows.take(slice(train_rows, train_rows + test_rows)),
        field_widths=(1,) * CRITEO_SPARSE,
        table_rows=len(vocabulary) + 1,
    )


# --- MovieLens 100k --------------------------------------------------------------------------------------------------

MOVIELENS_FEATURES = ("user", "item", "gender", "age", "occupation", "zip", "genres", "year", "decade", "hour", "weekday")
AGE_BOUNDS = (18, 25, 35, 45, 50, 56)


@dataclass(frozen=True)
class Rating:
    user: str
    item: str
    stars: int
    time: int


def movielens_users(folder: Path) -> dict[str, dict[str, list[str]]]:
    users = {}
    with open_text(first_existing(folder, ["u.user.gz", "u.user"])) as file:
        for user, age, gender, occupation, zip_code in csv.reader(file, delimiter="|"):
            bucket = sum(int(age) >= bound for bound in AGE_BOUNDS)
            users[user] = {"gender": [gender], "age": [str(bucket)], "occupation": [occupation], "zip": [zip_code[:1]]}
    return users


def movielens_items(folder: Path) -> dict[str, dict[str, list[str]]]:
    items = {}
    with open_text(first_existing(folder, ["u.item.gz", "u.item"]), "latin-1") as file:
        for cells in csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE):
            year = cells[2][-4:]
            genres = [str(number) for number, flag in enumerate(cells[5:]) if flag == "1"]
            items[cells[0]] = {"year": [year], "decade": [year[:3]], "genres": genres}
    return items


def movielens_ratings(folder: Path) -> list[Rating]:
    with open_text(first_existing(folder, ["u.data.gz", "u.data"])) as file:
        return [Rating(u, i, int(s), int(t)) for u, i, s, t in csv.reader(file, delimiter="\t")]


def split_by_user(ratings: Sequence[Rating]) -> list[str]:
    """The part of each rating. A user's n ratings are ordered by (time, item id): the last ⌊n/5⌋ are `test`, and the
    last ⌊m/10⌋ of the m ratings before them are `valid`. For a measurement on `test`, `valid` is trained on too."""
    by_user = defaultdict(list)
    for index, rating in enumerate(ratings):
        by_user[rating.user].append(index)
    parts = ["train"] * len(ratings)
    for indices in by_user.values():
        indices.sort(key=lambda index: (ratings[index].time, int(ratings[index].item)))
        tests = len(indices) // 5
        rest = len(indices) - tests
        for index in indices[rest:]:
            parts[index] = "test"
        for index in indices[rest - rest // 10 : rest]:
            parts[index] = "valid"
    return parts


def movielens(folder: Path, features: Sequence[str]) -> Dataset:
    """Label: rating ≥ 4. The rows of a part are ordered by time, then user, then item id. `valid` is the end of
    `train`."""
    users, items, ratings = movielens_users(folder), movielens_items(folder), movielens_ratings(folder)
    widths = {name: 1 for name in MOVIELENS_FEATURES} | {"genres": max(len(item["genres"]) for item in items.values())}
    vocabulary, values = Vocabulary(), []
    for rating in ratings:
        when = datetime.fromtimestamp(rating.time, timezone.utc)
        cells = users[rating.user] | items[rating.item]
        cells |= {"user": [rating.user], "item": [rating.item], "hour": [when.hour], "weekday": [when.weekday()]}
        values.append([[vocabulary.number(field, v) for v in cells[name]] for field, name in enumerate(features)])
    padding = len(vocabulary)
    ids = [
        [number for name, cell in zip(features, row) for number in cell + [padding] * (widths[name] - len(cell))]
        for row in values
    ]
    rows = Rows(torch.tensor(ids), torch.zeros(len(ratings), 0), torch.tensor([float(r.stars >= 4) for r in ratings]))
    order = sorted(range(len(ratings)), key=lambda i: (ratings[i].time, int(ratings[i].user), int(ratings[i].item)))
    parts = split_by_user(ratings)
    index = {name: torch.tensor([i for i in order if parts[i] == name]) for name in ("train", "valid", "test")}
    return Dataset(
        train=rows.take(torch.cat([index["train"], index["valid"]])),
        valid=rows.take(index["valid"]),
        test=rows.take(index["test"]),
        field_widths=tuple(widths[name] for name in features),
        table_rows=padding + 1,
    )


def without_valid(data: Dataset) -> Rows:
    return data.train.take(slice(0, len(data.train) - len(data.valid)))
