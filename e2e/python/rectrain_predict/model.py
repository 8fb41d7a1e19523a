"""A model in a folder, and its predictions."""

import json
import math
from pathlib import Path

import numpy as np
import onnxruntime

from .initial import initial_values
from .keys import key, key_in_table, read, trim

FORMAT, VERSION = "rectrain-serving", 1
_DTYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "int8": "i1"}


class Rows:
    """The rows of one row group, mapped into memory."""

    def __init__(self, folder, rows, seed, initial):
        self.dim, self.seed, self.initial, self.type = rows["dim"], seed, initial, rows["valueType"]
        path, count = folder / rows["file"], rows["rows"]
        if path.stat().st_size != rows["bytes"]:
            raise ValueError(f"{path} has another size than model.json says; export the checkpoint again")

        def array(offset, dtype, shape):
            if count == 0:
                return np.zeros(shape, dtype)
            return np.memmap(path, dtype, "r", offset, shape)

        self.keys = array(rows["keysOffset"], "<u8", (count,))
        self.values = array(rows["valuesOffset"], _DTYPES[self.type], (count, self.dim))
        scales = rows.get("scalesOffset")
        self.scales = None if scales is None else array(scales, "<f4", (count,))

    def read(self, keys):
        """The rows of keys, [keys, dim]. A key without a row reads as its initial values."""
        out = np.zeros((len(keys), self.dim), np.float32)
        places = np.searchsorted(self.keys, keys)
        inside = np.minimum(places, max(len(self.keys) - 1, 0))
        found = self.keys[inside] == keys if len(self.keys) else np.zeros(len(keys), bool)
        out[found] = self._decode(places[found])
        if not found.all():
            out[~found] = initial_values(keys[~found], self.dim, self.seed, self.initial)
        return out

    def _decode(self, places):
        values = self.values[places]
        if self.type == "bf16":
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        values = values.astype(np.float32)
        return values if self.scales is None else values * self.scales[places][:, None]


class Model:
    """A model that `rectrain checkpoint export --for serving` wrote into `folder`."""

    def __init__(self, folder):
        folder = Path(folder)
        model = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        if model.get("format") != FORMAT:
            raise ValueError(f"{folder} is no export for serving; write one with `rectrain checkpoint export --for serving`")
        if model["version"] > VERSION:
            raise ValueError(f"{folder} has version {model['version']}; use a newer rectrain_predict")
        self.description = model
        self.sparse, self.dense = model["sparseFeatures"], model["denseFeatures"]
        self.nulls = {marker.strip().encode("utf-8").lower() for marker in model["nullValues"]} | {b""}
        initial = model["initialValues"]
        self.rows = [Rows(folder, rows, initial["seed"], initial["groups"][rows["group"]]) for rows in model["rows"]]
        self._check_keys()
        self.session = onnxruntime.InferenceSession(
            str(folder / model["tower"]["file"]), providers=["CPUExecutionProvider"]
        )

    def _check_keys(self):
        vectors = self.description["keys"]
        seeds = [feature["tableSeed"] for feature in self.sparse if feature["table"] == vectors["table"]]
        for vector in vectors["vectors"] if seeds else []:
            found = key(vector["value"], int(seeds[0], 16))
            if found != int(vector["key"], 16):
                raise ValueError(f"the key of {vector['value']!r} is {found:016x}, and model.json says {vector['key']}")

    def predict(self, columns):
        """The probability of each row. `columns` has one sequence of cells for each feature.

        A cell is None, a number or a text. A cell of a multi-valued feature may be a list.
        """
        names = [feature["name"] for feature in self.sparse + self.dense]
        missing = [name for name in names if name not in columns]
        if missing:
            raise KeyError(f"there is no column `{missing[0]}`; give one sequence of cells for each of {names}")
        count = len(columns[names[0]])
        dims = [feature["dim"] for feature in self.sparse]
        embeddings = np.zeros((count, sum(dims)), np.float32)
        linear = np.zeros((count, len(self.sparse)), np.float32)
        for place, feature in enumerate(self.sparse):
            pooled = self._pool(feature, columns[feature["name"]])
            first = 1 if self.description["linear"] else 0
            embeddings[:, feature["offset"] : feature["offset"] + feature["dim"]] = pooled[:, first:]
            if first:
                linear[:, place] = pooled[:, 0]
        dense = [[self._number(feature, cell) for cell in columns[feature["name"]]] for feature in self.dense]
        dense = np.array(dense, np.float32).reshape(len(self.dense), count).T
        given = {"dense": np.ascontiguousarray(dense), "embeddings": embeddings, "linear": linear}
        feed = {wanted.name: given[wanted.name] for wanted in self.session.get_inputs()}
        return self.session.run([self.description["output"]], feed)[0][:, 0]

    def _pool(self, feature, cells):
        rows = self.rows[feature["group"]]
        seed, buckets = int(feature["tableSeed"], 16), feature.get("hashBuckets")
        ids = [self._ids(feature, cell) for cell in cells]
        counts = np.array([len(of_row) for of_row in ids], np.int64)
        keys = np.array([key_in_table(value, seed, buckets) for of_row in ids for value in of_row], np.uint64)
        pooled = np.zeros((len(cells), rows.dim), np.float32)
        np.add.at(pooled, np.repeat(np.arange(len(cells)), counts), rows.read(keys))
        divisor = np.maximum(counts, 1).astype(np.float32)[:, None]
        if feature["pooling"] == "mean":
            pooled /= divisor
        elif feature["pooling"] == "sqrtN":
            pooled /= np.sqrt(divisor)
        return pooled

    def _ids(self, feature, cell):
        """The ids of a cell: integers and bytes."""
        separator = feature["separator"]
        if separator is None:
            value = self._id(cell)
            if value is not None:
                return [value]
            return [b""] if feature["missing"] == "token" else []
        if isinstance(cell, (list, tuple, np.ndarray)):
            pieces = list(cell)
        elif isinstance(cell, (str, bytes)):
            text = cell.encode("utf-8") if isinstance(cell, str) else cell
            pieces = text.split(separator.encode("utf-8"))
        else:
            pieces = [cell]
        return [value for value in map(self._id, pieces) if value is not None]

    def _id(self, cell):
        """An id as an integer or bytes. None if it is missing."""
        if cell is None or isinstance(cell, (float, np.floating)) and math.isnan(cell):
            return None
        if isinstance(cell, str):
            cell = cell.encode("utf-8")
        if isinstance(cell, bytes):
            value = read(cell)
            return None if isinstance(value, bytes) and self._is_null(value) else value
        if int(cell) != cell:
            raise ValueError(f"{cell!r} is no id; give an integer or a text")
        return int(cell)

    def _is_null(self, text):
        # Upper and lower case are equal in ASCII only, as `bytes.lower` has it.
        return text.lower() in self.nulls

    def _number(self, feature, cell):
        """The model's input for a cell of a dense feature."""
        if isinstance(cell, (str, bytes)):
            text = cell.encode("utf-8") if isinstance(cell, str) else cell
            cell = None if self._is_null(trim(text)) else float(text)
        if cell is None or math.isnan(cell):
            return feature["missing"]
        value = _transformed(feature["transform"], np.float32(cell))
        if not abs(value) <= feature["limit"]:
            raise ValueError(f"`{feature['name']}`: {cell!r} is beyond the limit {feature['limit']} of the feature")
        return value


def _transformed(transform, x):
    """The function that training applied to a number, in 32 bits."""
    if transform == "identity":
        return x
    if transform == "log1p":
        return np.log1p(np.maximum(x, np.float32(0)))
    if transform == "signedLog1p":
        return np.copysign(np.log1p(np.abs(x)), x)
    (kind, setting), *_ = transform.items()
    if kind == "standardize":
        return (x - np.float32(setting["mean"])) / np.float32(setting["std"])
    if kind == "minMax":
        return (x - np.float32(setting["min"])) / (np.float32(setting["max"]) - np.float32(setting["min"]))
    raise ValueError(f"there is no transform `{kind}`; use a newer rectrain_predict")
