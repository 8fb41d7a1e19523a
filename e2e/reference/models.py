"""The eight models and the sparse optimizer that PyTorch lacks. No data, no training loop.

Layers keep PyTorch's default initialisation (`nn.Linear`: weights and bias uniform in ±1/√fan_in)."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor, nn

MODELS = ("dlrm", "deepfm", "dcn", "dcnV2", "dnn", "wideDeep", "fm", "lr")
HAS_LINEAR = {"lr", "fm", "deepfm", "wideDeep"}
HAS_VECTORS = {"dlrm", "deepfm", "dcn", "dcnV2", "dnn", "wideDeep", "fm"}
HAS_MLP = {"deepfm", "dcn", "dcnV2", "dnn", "wideDeep"}


class Pooled(nn.Module):
    """All fields' tables in one: ids (batch, columns) -> (batch, fields, dim), the mean over each field's values.
    The last row is padding: it reads as zero and gets no gradient."""

    def __init__(self, table_rows: int, dim: int, field_widths: Sequence[int], init: str, scale: float) -> None:
        super().__init__()
        self.table = nn.Embedding(table_rows, dim, padding_idx=table_rows - 1, sparse=True)
        self.field_widths = tuple(field_widths)
        if init == "normal":
            nn.init.normal_(self.table.weight, 0.0, scale)
        else:
            nn.init.uniform_(self.table.weight, -scale, scale)
        with torch.no_grad():
            self.table.weight[-1] = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        values = self.table(ids)
        if set(self.field_widths) == {1}:
            return values
        present = (ids != self.table.padding_idx).to(values.dtype)
        fields, start = [], 0
        for width in self.field_widths:
            part = slice(start, start + width)
            count = present[:, part].sum(1, keepdim=True).clamp(min=1.0)
            fields.append(values[:, part].sum(1) / count)
            start += width
        return torch.stack(fields, 1)


def mlp(sizes: Sequence[int], dropout: float) -> nn.Sequential:
    """Linear, ReLU (and dropout) for every pair of neighbouring sizes."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        if dropout > 0.0:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


class Linear(nn.Module):
    """Σ first-order weights of the sparse fields + w·dense + b."""

    def __init__(self, table_rows: int, field_widths: Sequence[int], dense_width: int) -> None:
        super().__init__()
        self.first_order = Pooled(table_rows, 1, field_widths, "uniform", 0.0)
        self.dense = nn.Linear(dense_width, 1) if dense_width else None
        self.bias = None if dense_width else nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rest = self.dense(dense).squeeze(1) if self.dense is not None else self.bias
        return self.first_order(ids).sum((1, 2)) + rest


class CrossVectors(nn.Module):
    """DCN (Wang et al. 2017, eq. 3): x ← x₀ (x·w) + b + x, layer after layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(layers))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for weight, bias in zip(self.weights, self.biases):
            x = x0 * weight(x) + bias + x
        return x


class Cross(nn.Module):
    """DCN V2 (Wang et al. 2021, eq. 1): x ← x₀ ∗ (W x + b) + x, layer after layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


def factorization(vectors: Tensor) -> Tensor:
    """FM (Rendle 2010, eq. 3): ½ Σ_d ((Σ_f v)² − Σ_f v²) over (batch, fields, dim)."""
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)


class Dlrm(nn.Module):
    """DLRM (Naumov et al. 2019): the bottom MLP's output, concatenated with the pairwise dots of that output and the
    fields' vectors."""

    def __init__(self, fields: int, dense_width: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.bottom = mlp([dense_width, 512, 256, dim], 0.0)
        pairs = (fields + 1) * fields // 2
        self.top = nn.Sequential(mlp([dim + pairs, 512, 256], dropout), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.triu_indices(fields + 1, fields + 1, offset=1), persistent=False)

    def forward(self, vectors: Tensor, dense: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        stacked = torch.cat([bottom.unsqueeze(1), vectors], 1)
        dots = (stacked @ stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, dots], 1)).squeeze(1)


HAS_CROSSES = {"dcn": CrossVectors, "dcnV2": Cross}


class Model(nn.Module):
    """(ids, dense) -> logits (batch,)."""

    def __init__(
        self,
        name: str,
        table_rows: int,
        field_widths: Sequence[int],
        dense_width: int,
        dim: int = 16,
        hidden: Sequence[int] = (256, 128),
        cross_layers: int = 3,
        dropout: float = 0.0,
        init: str = "normal",
        init_scale: float = 0.01,
    ) -> None:
        super().__init__()
        self.name = name
        fields = len(field_widths)
        flat = fields * dim + dense_width
        if name in HAS_LINEAR:
            self.linear = Linear(table_rows, field_widths, dense_width)
        if name in HAS_VECTORS:
            self.vectors = Pooled(table_rows, dim, field_widths, init, init_scale)
        if name == "dlrm":
            self.dlrm = Dlrm(fields, dense_width, dim, dropout)
        if name in HAS_MLP:
            self.deep = mlp([flat, *hidden], dropout)
            self.head = nn.Linear(hidden[-1] + (flat if name in HAS_CROSSES else 0), 1)
        if name in HAS_CROSSES:
            self.cross = HAS_CROSSES[name](flat, cross_layers)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        if self.name == "lr":
            return self.linear(ids, dense)
        vectors = self.vectors(ids)
        if self.name == "dlrm":
            return self.dlrm(vectors, dense)
        if self.name == "fm":
            return self.linear(ids, dense) + factorization(vectors)
        flat = torch.cat([vectors.flatten(1), dense], 1)
        deep = self.deep(flat)
        if self.name in HAS_CROSSES:
            return self.head(torch.cat([self.cross(flat), deep], 1)).squeeze(1)
        logit = self.head(deep).squeeze(1)
        if self.name in HAS_LINEAR:
            logit = logit + self.linear(ids, dense)
        if self.name == "deepfm":
            logit = logit + factorization(vectors)
        return logit

    def sparse_parameters(self) -> list[nn.Parameter]:
        return [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]

    def dense_parameters(self) -> list[nn.Parameter]:
        sparse = {id(parameter) for parameter in self.sparse_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in sparse]


class RowWiseAdagrad(torch.optim.Optimizer):
    """One accumulator per row: a ← a + ‖g‖²/d, w ← w − lr g / (√a + ε), for rows with a gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, eps: float = 1e-10) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros(len(parameter))
                gradient = parameter.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                state["sum"][rows] += values.square().mean(1)
                scale = state["sum"][rows].sqrt() + group["eps"]
                parameter.index_add_(0, rows, values / scale.unsqueeze(1), alpha=-group["lr"])
