"""Tests for `python -m unittest`: the reference's arithmetic, compared with plain loops, and the splits."""

from __future__ import annotations

import itertools
import unittest
from collections import defaultdict

import torch

from data import Rating, split_by_user
from models import MODELS, Cross, Dlrm, Model, Pooled, RowWiseAdagrad, factorization
from reference import auc, window_shuffle


class Reference(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)

    def test_auc_is_the_share_of_ordered_pairs_with_ties_as_halves(self) -> None:
        score = torch.randint(0, 20, (300,)).double()
        label = torch.randint(0, 2, (300,)).double()
        pairs = [(p, n) for p, n in itertools.product(score[label == 1.0].tolist(), score[label == 0.0].tolist())]
        naive = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)
        self.assertAlmostEqual(auc(score, label), naive, places=12)

    def test_factorization_is_the_sum_of_pairwise_dots(self) -> None:
        vectors = torch.randn(4, 5, 3, dtype=torch.double)
        naive = sum((vectors[:, i] * vectors[:, j]).sum(1) for i, j in itertools.combinations(range(5), 2))
        torch.testing.assert_close(factorization(vectors), naive)

    def test_the_top_of_dlrm_gets_the_bottom_output_and_each_pair_once(self) -> None:
        model = Dlrm(fields=3, dense_width=2, dim=4, dropout=0.0)
        vectors, dense = torch.randn(6, 3, 4), torch.randn(6, 2)
        bottom = model.bottom(dense)
        self.assertTrue(bool((bottom >= 0.0).all()))
        stacked = [bottom, *vectors.unbind(1)]
        dots = [(stacked[i] * stacked[j]).sum(1, keepdim=True) for i, j in itertools.combinations(range(4), 2)]
        torch.testing.assert_close(model(vectors, dense), model.top(torch.cat([bottom, *dots], 1)).squeeze(1))

    def test_cross_layers_multiply_by_the_first_input(self) -> None:
        cross, x0 = Cross(5, 3), torch.randn(2, 5)
        x = x0
        for layer in cross.layers:
            x = x0 * (x @ layer.weight.T + layer.bias) + x
        torch.testing.assert_close(cross(x0), x)

    def test_padding_neither_counts_in_the_mean_nor_learns(self) -> None:
        pooled = Pooled(10, 2, (1, 3), "normal", 1.0)
        out = pooled(torch.tensor([[0, 1, 2, 9]]))
        torch.testing.assert_close(out[0, 1], (pooled.table.weight[1] + pooled.table.weight[2]) / 2.0)
        out.sum().backward()
        self.assertEqual(pooled.table.weight.grad.coalesce().indices()[0].tolist(), [0, 1, 2])

    def test_every_model_gives_one_logit_per_row_and_all_gradients(self) -> None:
        for name in MODELS:
            model = Model(name, 20, (1, 1, 2), 2)
            model(torch.randint(0, 19, (8, 4)), torch.rand(8, 2)).sum().backward()
            missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
            self.assertEqual(missing, [], name)

    def test_row_wise_adagrad_follows_its_formula_and_leaves_absent_rows(self) -> None:
        table = torch.nn.Embedding(4, 2, sparse=True)
        before = table.weight.detach().clone()
        optimizer = RowWiseAdagrad([table.weight], lr=0.1)
        (table(torch.tensor([1, 1])) * torch.tensor([1.0, 2.0])).sum().backward()
        optimizer.step()
        gradient = torch.tensor([2.0, 4.0])
        expected = before[1] - 0.1 * gradient / (gradient.square().mean().sqrt() + 1e-10)
        torch.testing.assert_close(table.weight[1], expected)
        torch.testing.assert_close(table.weight[[0, 2, 3]], before[[0, 2, 3]])

    def test_a_users_last_fifth_by_time_is_the_test(self) -> None:
        ratings = [Rating(str(user), str(item), 3, item // 3) for user in (1, 2) for item in range(25 + user)]
        parts = defaultdict(list)
        for rating, part in zip(ratings, split_by_user(ratings)):
            parts[rating.user, part].append(int(rating.item))
        self.assertEqual(parts["1", "test"], list(range(21, 26)))
        self.assertEqual(parts["1", "valid"], [19, 20])
        self.assertEqual(parts["2", "test"], list(range(22, 27)))

    def test_a_window_shuffle_reads_ahead_at_most_one_window(self) -> None:
        order = window_shuffle(500, 50, torch.Generator().manual_seed(1)).tolist()
        self.assertEqual(sorted(order), list(range(500)))
        self.assertTrue(all(row < 50 + step for step, row in enumerate(order)))
        self.assertNotEqual(order, list(range(500)))


if __name__ == "__main__":
    unittest.main()
