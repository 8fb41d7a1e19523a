"""Predicts with a model that `rectrain checkpoint export --for serving` wrote.

    from rectrain_predict import Model

    model = Model("export")
    model.predict({"user": ["u1", "u2"], "tags": ["a|b", ""], "age": [31.0, None]})

It maps the rows into memory, hashes ids as rectrain does, and runs the tower with onnxruntime.
"""

from .keys import key
from .model import Model

__all__ = ["Model", "key"]
