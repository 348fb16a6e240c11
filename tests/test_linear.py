"""linear: many heads, each the one solution of its own convex problem."""
import numpy as np
import pytest
import torch
from fedinterp.core import InputError, rng_for
from fedinterp.linear import fit_linear, train_linear


def blobs(n=400, d=30, classes=4):
    r = rng_for(0, "blobs")
    y = torch.arange(n) % classes
    x = torch.from_numpy(r.standard_normal((n, d))).float() + 2 * torch.eye(d)[y]
    return x, y, torch.from_numpy(np.stack([rng_for(k, "rows").permutation(n)[:80] for k in range(7)]))


def gradient(x, y, rows, heads, draw, penalty, toward=None):
    w, b, xb = heads.weight[draw].clone().requires_grad_(), heads.bias[draw].clone().requires_grad_(), x[rows[draw]]
    size = (xb - xb.mean(0)).square().sum() / len(xb)
    moved = w if toward is None else w - toward
    (torch.nn.functional.cross_entropy(xb @ w.T + b, y[rows[draw]]) + penalty * size * moved.square().sum() / 2).backward()
    return max(w.grad.abs().max().item(), b.grad.abs().max().item())


@pytest.mark.parametrize("d", (30, 200))  # fewer and more features than rows
def test_the_gradient_vanishes_at_every_solution(d):
    x, y, rows = blobs(d=d)
    heads = fit_linear(x, y[rows], rows, 4, penalty=1e-3)
    assert max(gradient(x, y, rows, heads, k, 1e-3) for k in range(7)) < 2e-3


def test_the_penalty_pulls_towards_the_given_head():
    x, y, rows = blobs()
    start = torch.from_numpy(rng_for(0, "w").standard_normal((4, 30))).float()
    heads = fit_linear(x, y[rows], rows, 4, start, torch.zeros(4), penalty=1e-2)
    assert gradient(x, y, rows, heads, 0, 1e-2, toward=start) < 2e-3
    far = fit_linear(x, y[rows], rows, 4, start, torch.zeros(4), penalty=1e4)
    assert (far.weight - start).abs().max() < 1e-3


def test_a_draw_is_solved_alike_alone_and_among_others():
    x, y, rows = blobs()
    among, alone = fit_linear(x, y[rows], rows, 4, penalty=1e-3), fit_linear(x, y[rows[6:]], rows[6:], 4, penalty=1e-3)
    assert torch.allclose(among.weight[6], alone.weight[0], atol=5e-3)


def test_only_the_rows_of_a_draw_are_read():
    x, y, rows = blobs()
    heads = fit_linear(x, y[rows], rows, 4)
    spoilt = torch.full_like(x, float("nan"))
    spoilt[rows.unique()] = x[rows.unique()]
    again = fit_linear(spoilt, y[rows], rows, 4)
    assert torch.equal(heads.weight, again.weight) and torch.equal(heads.penalty, again.penalty)


def test_modes_move_what_they_say():
    x, y, rows = blobs()
    w, b = torch.eye(30)[:4], torch.zeros(4)
    bias, scale = fit_linear(x, y[rows], rows, 4, w, b, mode="bias"), fit_linear(x, y[rows], rows, 4, w, b, mode="scale")
    assert torch.equal(bias.weight, w.expand(7, -1, -1)) and bias.bias.abs().max() > 0
    factor = scale.weight[:, range(4), range(4)]
    assert torch.allclose(scale.weight, factor[..., None] * w, atol=1e-6) and (factor - 1).abs().max() > 0.01


def test_shifted_biases_are_found_again_from_labels():
    x, y, rows = blobs()
    w, shift = 3 * torch.eye(30)[:4], torch.tensor([5.0, -5, 0, 0])
    heads = fit_linear(x, y[rows], rows, 4, w, shift, mode="bias")
    straight = ((x @ w.T).argmax(-1) == y).float().mean()
    assert ((x @ w.T + shift).argmax(-1) == y).float().mean() < straight - 0.2 and heads.answers(x, y).mean() > straight - 0.03


def test_bits_do_not_depend_on_the_number_of_threads():
    x, y, rows = blobs()
    old, found = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found += [fit_linear(x, y[rows], rows, 4), train_linear(x, y[rows], rows, 4, epochs=2)[-1]]
    finally: torch.set_num_threads(old)
    assert torch.equal(found[0].weight, found[2].weight) and torch.equal(found[1].weight, found[3].weight)


def test_training_all_draws_abreast_is_training_each():
    x, y, rows = blobs()
    abreast, first = train_linear(x, y[rows], rows, 4, epochs=3, lr=1e-2), train_linear(x, y[rows[:1]], rows[:1], 4, epochs=3, lr=1e-2)
    assert torch.allclose(abreast[-1].weight[0], first[-1].weight[0], atol=1e-5)


def test_labels_and_rows_of_other_shapes_are_refused():
    x, y, rows = blobs()
    with pytest.raises(InputError, match="should be"): fit_linear(x, y[rows[:2]], rows, 4)
