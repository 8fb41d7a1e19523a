"""Does the work of `rectrain-bench step` and of `dlrm.yaml` with PyTorch and TorchRec. Prints one line of JSON with
the samples per second.

    python peers.py --work a --peer torch          towers a, b and dlrm: the dense part alone, Adam (fused)
    python peers.py --work job --peer torchrec     a whole step of the DLRM: 26 embeddings of 16 values, 2 M rows in
                                                   all, AdaGrad, no data loading

The peers: `torch` (nn.EmbeddingBag with sparse gradients), `torch-bf16` (the same under autocast), and for `job`
also `torchrec` and `torchrec-bf16` (TorchRec's fused tables on the CPU, which are FBGEMM's split table batched
embeddings).
"""

import torch
from torch import nn

from work import BATCHES, DENSE, DIM, FEATURES, ROWS, TOWERS, arguments, id_batches, measure, report



def mlp(inputs, sizes, last_relu):
    layers = []
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Dlrm(nn.Module):
    """Naumov et al. 2019: bottom MLP, dot products of all pairs, top MLP."""

    def __init__(self):
        super().__init__()
        self.bottom = mlp(DENSE, [512, 256, DIM], True)
        pairs = (FEATURES + 1) * FEATURES // 2
        self.top = mlp(pairs + DIM, [512, 256, 1], False)
        rows, columns = torch.tril_indices(FEATURES + 1, FEATURES + 1, -1)
        self.register_buffer("triangle", rows * (FEATURES + 1) + columns)

    def forward(self, embeddings, dense):
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None, :].to(embeddings.dtype), embeddings.view(-1, FEATURES, DIM)], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        # The gradient of index_select is faster than the gradient of indexing with two tensors.
        dots = dots.flatten(1).index_select(1, self.triangle)
        return self.top(torch.cat([bottom, dots.to(bottom.dtype)], 1))


class Tower(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = mlp(FEATURES * DIM + DENSE, sizes + [1], False)

    def forward(self, embeddings, dense):
        return self.layers(torch.cat([embeddings, dense], 1))


class Bags(nn.Module):
    """A table per feature, with gradients for the rows that a batch touches."""

    def __init__(self):
        super().__init__()
        rows = ROWS // FEATURES
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in range(FEATURES)])
        # The initial values of Rectrain's rows. PyTorch's have a standard deviation of 1.
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.01)
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)

    def forward(self, ids):
        offsets = torch.arange(ids.shape[1])
        return torch.cat([table(ids[index], offsets) for index, table in enumerate(self.tables)], 1)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Fused(nn.Module):
    """TorchRec's fused tables: the optimizer runs in the backward pass."""

    def __init__(self):
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        self.names = [f"C{index}" for index in range(FEATURES)]
        tables = [
            EmbeddingBagConfig(
                name=f"table{index}", embedding_dim=DIM, num_embeddings=ROWS // FEATURES,
                feature_names=[name], pooling=PoolingType.SUM,
            )
            for index, name in enumerate(self.names)
        ]
        assert EmbOptimType.EXACT_ADAGRAD
        self.bags = FusedEmbeddingBagCollection(
            tables=tables, optimizer_type=torch.optim.Adagrad, optimizer_kwargs={"lr": 0.05}, device=torch.device("cpu")
        )
        self.jagged = KeyedJaggedTensor

    def forward(self, ids):
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        keyed = self.jagged(keys=self.names, values=ids.reshape(-1), lengths=lengths)
        return self.bags(keyed).values()

    def step(self):
        pass


def main():
    args = arguments(__doc__, ["torch", "torch-bf16", "torchrec", "torchrec-bf16"])
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    batch = args.batch or BATCHES[args.work]

    model = Tower(TOWERS[args.work]) if args.work in TOWERS else Dlrm()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loss_of = nn.BCEWithLogitsLoss()
    dense = torch.rand(batch, DENSE) - 0.5
    labels = (torch.rand(batch, 1) > 0.5).float()
    bf16 = args.peer.endswith("bf16")

    def dense_step(embeddings):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(embeddings, dense)
        loss_of(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if args.work == "job":
        tables = Fused() if args.peer.startswith("torchrec") else Bags()
        batches = [torch.from_numpy(ids) for ids in id_batches(batch, args.steps)]

        def step(count):
            dense_step(tables(batches[count]))
            tables.step()
    else:
        embeddings = (torch.rand(batch, FEATURES * DIM) - 0.5).requires_grad_()

        def step(_):
            embeddings.grad = None
            dense_step(embeddings)

    report(args, batch, measure(step, batch, args.steps))


if __name__ == "__main__":
    main()
