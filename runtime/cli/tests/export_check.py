"""Loads exported checkpoints, and compares predictions from them with the tower's.

It loads them with pyarrow and safetensors, and predicts with numpy and onnxruntime. export.rs calls it
with folders of exports. Each folder has the export and expected.json: samples as keys and dense
values, and the tower's prediction of each.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow.parquet as parquet
from safetensors.numpy import load_file

TOLERANCE = 1e-5


def tables(folder):
    """A dict for each row group: key -> (first-order weight, embedding).

    The rows come from Parquet, and must equal those in the safetensors file.
    """
    groups = []
    for path in sorted(folder.glob("embeddings-*.parquet")):
        columns = parquet.read_table(path)
        other = load_file(path.with_suffix(".safetensors"))
        assert set(other) == set(columns.column_names), (set(other), columns.column_names)
        keys = columns["key"].to_numpy()
        assert np.array_equal(keys, other["key"]) and np.all(np.diff(keys.astype(object)) > 0)
        count = len(keys)
        arrays = {}
        for name in ("linear", "embedding", "optimizer_state"):
            if name in other:
                column = columns[name].combine_chunks()
                values = column.to_numpy() if name == "linear" else column.flatten().to_numpy().reshape(count, -1)
                assert np.array_equal(values, other[name]), name
                arrays[name] = values
        assert "optimizer_state" in arrays
        zeros = np.zeros((count, 0), np.float32)
        linear = arrays.get("linear", np.zeros(count, np.float32))
        groups.append(dict(zip(keys.tolist(), zip(linear, arrays.get("embedding", zeros)))))
    return groups


def inputs(expected, features, groups):
    dense = np.array([sample["dense"] for sample in expected["samples"]], np.float32)
    embeddings, linear = [], []
    for sample in expected["samples"]:
        rows = [
            [groups[feature["group"]][int(key)] for key in keys] for feature, keys in zip(features, sample["keys"])
        ]
        linear.append([sum(weight for weight, _ in of) for of in rows])
        embeddings.append(np.concatenate([np.sum([vector for _, vector in of], axis=0) for of in rows]))
    return {
        "dense": dense,
        "embeddings": np.array(embeddings, np.float32),
        "linear": np.array(linear, np.float32),
    }


def logits(model, p, dense, embeddings, linear):
    """Computes the logits with numpy, from the papers' formulas and the parameters' names."""
    kind, count = model["kind"], len(model["embeddingDims"])

    def layer(name, x):
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def mlp(name, x):
        index = 0
        while f"{name}.{index}.weight" in p:
            x = np.maximum(layer(f"{name}.{index}", x), 0)
            index += 1
        return x

    both = np.concatenate([embeddings, dense], axis=1)
    vectors = embeddings.reshape(len(dense), count, -1)

    def first_order():
        return linear.sum(axis=1, keepdims=True) + dense @ p["firstOrder.weight"] + p["firstOrder.bias"]

    def second_order():
        pairs = [(vectors[:, i] * vectors[:, j]).sum(axis=1) for i in range(count) for j in range(i)]
        return np.sum(pairs, axis=0)[:, None]

    if kind == "lr":
        return first_order()
    if kind == "fm":
        return first_order() + second_order()
    if kind == "wideDeep":
        return first_order() + layer("deep.logit", mlp("deep", both))
    if kind == "deepfm":
        return first_order() + second_order() + layer("deep.logit", mlp("deep", both))
    if kind == "dnn":
        return layer("deep.logit", mlp("deep", both))
    if kind == "dlrm":
        bottom = np.maximum(layer("bottom.output", mlp("bottom", dense)), 0)
        all_vectors = [bottom] + [vectors[:, i] for i in range(count)]
        pairs = [
            (all_vectors[i] * all_vectors[j]).sum(axis=1, keepdims=True) for i in range(count + 1) for j in range(i)
        ]
        return layer("top.logit", mlp("top", np.concatenate([bottom] + pairs, axis=1)))
    if kind == "dcn":
        x, vectors_of_crosses = both, p["cross.weight"]
        for index in range(model["crossLayers"]):
            x = both * (x @ vectors_of_crosses[:, index : index + 1]) + p[f"cross.{index}.bias"] + x
        crossed = x @ vectors_of_crosses[:, model["crossLayers"] :]
        return crossed + layer("deep.logit", mlp("deep", both))
    if kind == "dcnV2":
        x = both
        for index in range(model["crossLayers"]):
            name = f"cross.{index}"
            reduced = x @ p[f"{name}.down"] if f"{name}.down" in p else x
            x = both * layer(name, reduced) + x
        if model["structure"] == "stacked":
            return layer("logit", mlp("deep", x))
        has_deep = "deep.0.weight" in p
        return layer("logit", np.concatenate([x, mlp("deep", both)], axis=1) if has_deep else x)
    raise ValueError(kind)


def check(folder):
    expected = json.loads((folder / "expected.json").read_text())
    description = json.loads((folder / "model.json").read_text())
    model, features = description["model"], description["features"]
    wanted = np.array(expected["predictions"], np.float64)
    given = inputs(expected, features, tables(folder))

    parameters = load_file(folder / "dense.safetensors")
    assert any(name.startswith("optimizer.m.") for name in parameters)
    own = 1 / (1 + np.exp(-logits(model, parameters, **given).astype(np.float64)))
    by_numpy = np.abs(own[:, 0] - wanted).max()

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    feed = {value.name: given[value.name] for value in session.get_inputs()}
    by_onnx = np.abs(session.run(["probability"], feed)[0][:, 0] - wanted).max()
    assert by_numpy <= TOLERANCE and by_onnx <= TOLERANCE, (model, by_numpy, by_onnx)
    print(f"equal {model['kind']}: numpy within {by_numpy:.1e}, onnxruntime within {by_onnx:.1e}")


for argument in sys.argv[1:]:
    check(Path(argument))
