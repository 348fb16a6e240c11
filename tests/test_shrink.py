import copy, json, pickle
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from fedinterp.channels import AdapterError, trace
from fedinterp.core import InputError, RunError, StorageError, seeded, torch_rng
from fedinterp.cost import apply_masks, cost, total
from fedinterp.models import build_model, predict, random_inputs
from fedinterp.shrink import load_small, save_small, shrink, unit_mask, unit_scores

BUILT = {"simple_cnn": dict(size=8, channels=(4, 5, 6), classes=3), "simple_cnn pooled": dict(size=8, channels=(4, 5, 6), classes=3, head="pool"),
         "resnet10": dict(size=16, channels=(3, 4, 5, 6), classes=3), "two_cnn": dict(size=12, hidden=3, features=7, grid=3, classes=3),
         "femnist_cnn": dict(hidden=3, features=7, grid=2, classes=3), "char_lstm": dict(hidden=6, embedding=4, vocab=7, size=9, classes=3)}


def lively(model, seed):
    "Every number varied: BatchNorm that has seen something, biases of both signs."
    rng = torch_rng(seed, "lively")
    for k, v in model.state_dict().items():
        if not v.is_floating_point(): continue
        v.mul_(0.5 + torch.rand(v.shape, generator=rng))
        if v.ndim < 2: v.add_(torch.rand(v.shape, generator=rng) if k.endswith("var") else 0.4 * torch.randn(v.shape, generator=rng))
    return model


def built(name, seed=0): return lively(build_model(name.split()[0], seed=seed, **BUILT[name]), seed)


def random_masks(model, seed):
    "Single weights, at a density that differs from tensor to tensor, down to almost nothing."
    rng = torch_rng(seed, "masks")
    return {n: torch.rand(p.shape, generator=rng) < float(torch.rand((), generator=rng)) ** 2 for n, p in model.named_parameters()}


def structured_masks(model, shape, seed, roles):
    "Whole channels of every group on the axes of some roles: rows with or without their biases, or columns."
    rng, params, masks = torch_rng(seed, "structured"), dict(model.named_parameters()), {}
    for group in trace(model, shape).groups.values():
        out = torch.rand(group.channels, generator=rng) < 0.5
        for e in group.entries:
            if e.name not in params or not roles(e, params[e.name]): continue
            mask = masks.setdefault(e.name, torch.ones_like(params[e.name], dtype=torch.bool))
            mask.unflatten(e.axis, (e.copies, group.channels, -1)).movedim(e.axis + 1, 0)[out] = False
    return masks


def unit_masks(model, shape, seed):
    groups = trace(model, shape).groups
    amount = float(torch.rand((), generator=torch_rng(seed, "amount")))
    return unit_mask({n: torch.rand(g.channels, generator=torch_rng(seed, n)) for n, g in groups.items()}, groups, amount, model)


MASKS = {"single weights": lambda m, shape, seed: random_masks(m, seed), "units": unit_masks,
         "rows, biases left": lambda m, shape, seed: structured_masks(m, shape, seed, lambda e, p: e.role == "write" and p.ndim > 1),
         "rows and biases": lambda m, shape, seed: structured_masks(m, shape, seed, lambda e, p: e.role == "write"),
         "columns": lambda m, shape, seed: structured_masks(m, shape, seed, lambda e, p: e.role == "read"),
         "norms": lambda m, shape, seed: structured_masks(m, shape, seed, lambda e, p: e.role == "scale" and e.name.endswith("weight"))}


def inputs(model, shape, n=24): return random_inputs(model, n, shape, torch_rng(0, "inputs"))


def off(model, small, masks, shape):
    "The largest difference of the logits, relative to the largest logit if that is above 1."
    x, masked = inputs(model, shape), apply_masks(model, masks)
    logits = predict(masked, x)
    return float((predict(small, x) - logits).abs().max() / max(1.0, float(logits.abs().max())))


def kept(small): return {n: len(k) for n, k in small.shrunk.kept.items()}


@pytest.mark.parametrize("how", MASKS)
@pytest.mark.parametrize("name", BUILT)
def test_the_smaller_model_equals_the_masked_one(name, how):
    removed = 0
    for seed in range(4):
        model = built(name, seed)
        shape, masks = model.input_shape, MASKS[how](model, model.input_shape, seed)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        small = shrink(model, masks=masks)
        assert off(model, small, masks, shape) < 1e-5, seed
        assert min(kept(small).values()) >= 1
        assert all(before[k].equal(v) for k, v in model.state_dict().items())
        removed += sum(small.shrunk.channels.values()) - sum(kept(small).values())
    if how != "norms" or name == "resnet10": assert removed > 0, "no mask of this kind has removed anything: the test shows nothing"


@pytest.mark.parametrize("name", BUILT)
def test_units_that_are_masked_whole_are_taken_out_and_nothing_else(name):
    model = built(name)
    groups = trace(model).groups
    ranks = {n: torch.arange(g.channels).double() / g.channels for n, g in groups.items()}
    small = shrink(model, masks=unit_mask(ranks, groups, 0.5, model))
    gone = {n: g.channels - kept(small)[n] for n, g in groups.items()}
    assert sum(gone.values()) >= round(0.5 * sum(g.channels for g in groups.values()))
    assert all(small.shrunk.kept[n] == list(range(gone[n], g.channels)) for n, g in groups.items())


@pytest.mark.parametrize("name", [n for n in BUILT if n != "char_lstm"])
def test_the_counter_sees_the_realised_multiply_adds(name):
    for seed in range(3):
        model = built(name, seed)
        small = shrink(model, masks=unit_masks(model, model.input_shape, seed))
        with FlopCounterMode(display=False) as counter, torch.no_grad(): small.eval()(torch.zeros(1, *model.input_shape))
        bill = cost(small)
        assert total(bill) == counter.get_total_flops() <= total(bill, "FLOPs dense") == total(cost(model))


def test_the_lstm_costs_what_the_formula_says():
    model = built("char_lstm")
    small = shrink(model, masks=unit_masks(model, model.input_shape, 1))
    e, a, b = (kept(small)[n] for n in ("embedding", "lstm1", "lstm2"))
    assert total(cost(small)) == 9 * (8 * a * (e + a) + 8 * b * (a + b)) + 2 * b * 3
    assert total(cost(small)) < total(cost(model))


@pytest.mark.parametrize("name", BUILT)
def test_it_trains_on(name):
    model = built(name)
    small = shrink(model, masks=unit_masks(model, model.input_shape, 1)).train()
    x, y = inputs(model, model.input_shape, 12), torch.arange(12) % 3
    before, losses = {k: v.detach().clone() for k, v in small.named_parameters()}, []
    adam = torch.optim.Adam(small.parameters(), lr=1e-2)
    for _ in range(20):
        adam.zero_grad()
        loss = F.cross_entropy(small(x), y)
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(p.requires_grad for p in small.parameters())
    assert any(not before[k].equal(p) for k, p in small.named_parameters())


@pytest.mark.parametrize("name", BUILT)
def test_it_saves_and_loads_bit_for_bit(name, tmp_path):
    model = built(name)
    small = shrink(model, masks=unit_masks(model, model.input_shape, 2))
    save_small(small, tmp_path/"small.safetensors")
    back = load_small(tmp_path/"small.safetensors", build_model(name.split()[0], seed=9, **BUILT[name]))
    x = inputs(model, model.input_shape)
    assert predict(back, x).equal(predict(small, x))
    assert back.shrunk == small.shrunk and str(back) == str(small)
    assert cost(back).equals(cost(small))
    assert pickle.loads(pickle.dumps(small)).shrunk == small.shrunk


def test_a_bias_that_took_up_a_constant_is_saved_too(tmp_path):
    with seeded(0, "no bias"): net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))
    with torch.no_grad(): net[0].weight[1], net[0].bias[1] = 0, 0.7
    small = shrink(lively(net, 0), (1, 8, 8), {"0.weight": torch.arange(4).ne(1)[:, None, None, None].expand(4, 1, 3, 3)})
    assert (small[2].bias is not None, small[0].out_channels) == (True, 3)
    assert off(net, small, {"0.weight": torch.arange(4).ne(1)[:, None, None, None].expand(4, 1, 3, 3)}, (1, 8, 8)) < 1e-5
    save_small(small, tmp_path/"small")
    x = torch.randn(4, 1, 8, 8, generator=torch_rng(0, "x"))
    assert predict(load_small(tmp_path/"small", net), x).equal(predict(small, x))


def test_it_can_be_shrunk_again_and_remembers_the_first_numbering(tmp_path):
    model = built("two_cnn")
    groups = trace(model).groups
    once = shrink(model, masks=unit_mask({n: torch.arange(g.channels).double() for n, g in groups.items()}, groups, 0.4, model))
    mine = trace(once).groups
    twice = shrink(once, masks=unit_mask({n: torch.arange(g.channels).double() for n, g in mine.items()}, mine, 0.4, once))
    assert all(set(twice.shrunk.kept[n]) <= set(once.shrunk.kept[n]) for n in groups)
    assert sum(kept(twice).values()) < sum(kept(once).values())
    assert twice.shrunk.channels == once.shrunk.channels == {n: g.channels for n, g in groups.items()}
    assert total(cost(twice), "FLOPs dense") == total(cost(model))
    save_small(twice, tmp_path/"twice")
    x = inputs(model, model.input_shape)
    assert predict(load_small(tmp_path/"twice", model), x).equal(predict(twice, x))


# ---- constants, layer by layer

def stack(*layers, shape=(2, 9, 9), classes=2, seed=0):
    "The layers, flattened and read by a linear head."
    with seeded(seed, "stack"):
        body = nn.Sequential(*(make() for make in layers)).eval()
        with torch.no_grad(): size = body(torch.zeros(1, *shape)).numel()
        return lively(nn.Sequential(*body, nn.Flatten(), nn.Linear(size, classes)), seed)


def first_rows(net, dead, name="0"):
    "A mask of whole filters of the first convolution, without their biases."
    weight = net.get_submodule(name).weight
    alive = torch.tensor([i not in dead for i in range(len(weight))])
    return {f"{name}.weight": alive.view(-1, *[1] * (weight.ndim - 1)).expand(weight.shape)}


def removed_from_first(net, dead, shape=(2, 9, 9), **kw):
    masks = first_rows(net, dead)
    small = shrink(net, shape, masks, **kw)
    error = off(net, small, masks, shape)
    return {n for n in range(len(net[0].weight))} - set(small.shrunk.kept[next(iter(small.shrunk.kept))]), error


conv = lambda *a, **kw: lambda: nn.Conv2d(*a, **kw)
POOLS = {"max, padded": lambda: nn.MaxPool2d(3, 2, padding=1), "average": lambda: nn.AvgPool2d(2), "average, padded": lambda: nn.AvgPool2d(3, 2, padding=1),
         "average, padding not counted": lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), "max, ceiled": lambda: nn.MaxPool2d(2, ceil_mode=True),
         "average, ceiled": lambda: nn.AvgPool2d(2, ceil_mode=True, padding=1), "adaptive, larger": lambda: nn.AdaptiveAvgPool2d(7),
         "adaptive": lambda: nn.AdaptiveAvgPool2d(2), "adaptive max": lambda: nn.AdaptiveMaxPool2d(3)}


@pytest.mark.parametrize("pool", POOLS)
def test_constants_behind_every_pooling_fold_into_a_linear_layer(pool):
    net = stack(conv(2, 5, 3, padding=1), nn.ReLU, POOLS[pool])
    with torch.no_grad(): net[0].bias[1], net[0].bias[3] = 0.9, -0.9  # alive behind ReLU, and not
    out, error = removed_from_first(net, {1, 3})
    assert out == {1, 3} and error < 1e-5


@pytest.mark.parametrize("pool, foldable", [("max, padded", True), ("average", True), ("average, padded", False), ("average, padding not counted", True), ("adaptive, larger", True)])
def test_before_an_unpadded_convolution_only_flat_maps_fold(pool, foldable):
    net = stack(conv(2, 5, 3, padding=1), nn.ReLU, POOLS[pool], conv(5, 3, 2))
    with torch.no_grad(): net[0].bias[1], net[0].bias[3] = 0.9, -0.9
    out, error = removed_from_first(net, {1, 3})
    assert out == ({1, 3} if foldable else {3}) and error < 1e-5


READERS = {"3×3, padded": (conv(5, 3, 3, padding=1), False), "3×3": (conv(5, 3, 3), True), "1×1": (conv(5, 3, 1), True), "1×1, padded": (conv(5, 3, 1, padding=1), False),
           "strided, padded": (conv(5, 3, 3, 2, 1), False), "padding that a stride never touches": (conv(5, 3, 1, 2, padding=0), True), "dilated": (conv(5, 3, 2, dilation=2), True),
           "reflecting": (conv(5, 3, 3, padding=1, padding_mode="reflect"), True), "circular": (conv(5, 3, 3, padding=1, padding_mode="circular"), True),
           "same": (conv(5, 3, 3, padding="same"), False), "without a bias": (conv(5, 3, 1, bias=False), True)}


@pytest.mark.parametrize("reader", READERS)
def test_a_dead_filter_with_a_bias_folds_where_that_is_exact_and_stays_elsewhere(reader):
    make, foldable = READERS[reader]
    net = stack(conv(2, 5, 3), nn.ReLU, make, nn.ReLU)
    with torch.no_grad(): net[0].bias[1], net[0].bias[3] = 0.9, -0.9
    out, error = removed_from_first(net, {1, 3})
    assert out == ({1, 3} if foldable else {3}) and error < 1e-5
    loose, error = removed_from_first(net, {1, 3}, allow_approx=True)
    assert loose == {1, 3} and (error < 1e-5) == foldable


def test_a_scale_of_zero_makes_a_batchnorm_channel_constant_in_spite_of_its_weights():
    net = stack(conv(2, 5, 3), lambda: nn.BatchNorm2d(5), nn.ReLU, conv(5, 3, 3), nn.ReLU)
    masks = {"1.weight": torch.tensor([True, False, True, True, False])}
    small = shrink(net, (2, 9, 9), masks)
    assert small.shrunk.kept["0"] == [0, 2, 3] and off(net, small, masks, (2, 9, 9)) < 1e-5


@pytest.mark.parametrize("norm, goes", [(lambda: nn.GroupNorm(5, 5), True), (lambda: nn.GroupNorm(1, 5), False), (lambda: nn.BatchNorm2d(5, affine=False), True),
                                        (lambda: nn.GroupNorm(5, 5, affine=False), True)])
def test_a_norm_over_all_channels_keeps_them_and_others_let_them_go(norm, goes):
    net = stack(conv(2, 5, 3), norm, nn.ReLU, conv(5, 3, 3), nn.ReLU)
    out, error = removed_from_first(net, {1, 3})
    assert out == ({1, 3} if goes else set()) and error < 1e-5


@pytest.mark.parametrize("times", [1, 2])
def test_depthwise_convolutions_shrink_with_their_inputs(times):
    net = stack(conv(2, 5, 3), nn.ReLU, conv(5, 5 * times, 3, groups=5, padding=1), nn.ReLU, conv(5 * times, 3, 3))
    with torch.no_grad(): net[0].bias[1], net[0].bias[3] = 0.9, -0.9
    masks = first_rows(net, {1, 3})
    small = shrink(net, (2, 9, 9), masks)
    assert off(net, small, masks, (2, 9, 9)) < 1e-5
    assert 3 not in small.shrunk.kept["0"] or bool((net[2].bias.view(5, times)[3] > 0).any())  # what the bias behind it makes of zero is a constant without borders
    whole = unit_mask({"0": torch.arange(5).double()}, trace(net, (2, 9, 9)).groups, 0.4, net)
    small = shrink(net, (2, 9, 9), whole)
    assert (small[2].groups, small[2].out_channels) == (3, 3 * times) and off(net, small, whole, (2, 9, 9)) < 1e-5


def test_a_channel_of_a_residual_stream_goes_only_when_every_reader_can_do_without():
    model = built("resnet10", 3)
    stream = next(g for n, g in trace(model).groups.items() if n == "conv1")
    params = dict(model.named_parameters())
    def without(*roles):
        masks = {}
        for e in stream.entries:
            if e.name in params and e.name.startswith(roles):
                masks.setdefault(e.name, torch.ones_like(params[e.name], dtype=torch.bool)).movedim(e.axis, 0)[1] = False
        return masks
    stem, block = without("conv1", "bn1"), without("block1.0.conv2", "block1.0.bn2")
    for masks, goes in ((stem, False), (block, False), (stem | block, True)):
        small = shrink(model, masks=masks)
        assert (1 not in small.shrunk.kept["conv1"]) == goes and off(model, small, masks, model.input_shape) < 1e-5


class Joined(nn.Module):
    def __init__(self, how): super().__init__(); self.a, self.b, self.fc, self.how = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3), nn.Linear(4, 2), how
    def forward(self, x): return self.fc(F.relu(self.how(self.a(x), self.b(x))).mean((2, 3)))


@pytest.mark.parametrize("how", [torch.add, torch.sub, torch.mul, torch.maximum])
def test_values_that_are_joined_are_constant_only_if_both_are(how):
    with seeded(1, "joined"): net = lively(Joined(how), 1)
    one, both = first_rows(net, {2}, "a"), first_rows(net, {2}, "a") | first_rows(net, {2}, "b")
    for masks, goes in ((one, False), (both, True)):
        small = shrink(net, (1, 6, 6), masks)
        assert (2 not in next(iter(small.shrunk.kept.values()))) == goes and off(net, small, masks, (1, 6, 6)) < 1e-5


# ---- the LSTM

def lstm_masks(model, **dead):
    "Masks of single LSTM units: layer -> function of its parameters' masks."
    masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    for layer, act in dead.items(): act({k: masks[f"{layer}.{k}_l0"] for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}, masks)
    return masks


def test_an_lstm_unit_without_a_candidate_is_zero_and_goes():
    model = built("char_lstm")
    def act(own, masks):
        for m in own.values(): m[2 * 6 + 3] = False  # the gates i, f, g, o stand one after the other; unit 3 of 6
    masks = lstm_masks(model, lstm1=act)
    small = shrink(model, masks=masks)
    assert small.shrunk.kept["lstm1"] == [0, 1, 2, 4, 5] and off(model, small, masks, model.input_shape) < 1e-5


def test_an_lstm_unit_with_rows_of_zero_and_a_bias_stays():
    model = built("char_lstm")
    def act(own, masks):
        for k in ("weight_ih", "weight_hh"): own[k][3::6] = False
    masks = lstm_masks(model, lstm1=act)
    small = shrink(model, masks=masks)
    assert len(small.shrunk.kept["lstm1"]) == 6 and off(model, small, masks, model.input_shape) < 1e-5


def test_an_lstm_unit_that_only_it_itself_reads_goes():
    model = built("char_lstm")
    def act(own, masks):
        others = torch.arange(24) % 6 != 3
        own["weight_hh"][others, 3] = False
        masks["lstm2.weight_ih_l0"][:, 3] = False
    masks = lstm_masks(model, lstm1=act)
    small = shrink(model, masks=masks)
    assert 3 not in small.shrunk.kept["lstm1"] and off(model, small, masks, model.input_shape) < 1e-5


def test_a_number_that_all_characters_share_is_folded_into_the_lstms_bias():
    model = built("char_lstm")
    with torch.no_grad(): model.embedding.weight[:, 2] = 0.8
    small = shrink(model)
    assert small.shrunk.kept["embedding"] == [0, 1, 3] and off(model, small, None, model.input_shape) < 1e-5


# ---- scores and masks of units

@pytest.mark.parametrize("how, multiple", [("mean", 1), ("max", 1), ("mean", 3)])
def test_unit_masks_are_nested_and_leave_the_floor_or_a_multiple(how, multiple):
    for name in BUILT:
        model = built(name)
        groups, before = trace(model).groups, None
        units = unit_scores({n: p.detach().abs() for n, p in model.named_parameters()}, groups, how)
        rows = {n: next(e for e in g.entries if e.role == "write" and e.axis == 0 or n == "embedding") for n, g in groups.items()}
        for amount in (0, 0.1, 0.35, 0.6, 0.85, 1):
            masks = unit_mask(units, groups, amount, model, floor=2, multiple=multiple)
            assert before is None or all(bool((masks[n] <= before[n]).all()) for n in masks)
            before = masks
            for n, g in groups.items():
                left = int(masks[rows[n].name].movedim(rows[n].axis, 0).flatten(1).any(1).sum()) // rows[n].copies
                assert left >= min(2, g.channels) and (left % multiple == 0 or left == g.channels)
        assert all(k <= max(2, multiple) for k in kept(shrink(model, masks=before)).values())


def test_a_units_score_reads_its_rows_and_columns_and_no_bias():
    model = built("simple_cnn")
    groups, zero = trace(model).groups, {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    zero["conv2.weight"][3] = 6.0
    zero["conv2.bias"][1] = 1e9
    found = unit_scores(zero, groups)
    rows, columns = 4 * 9, 6 * 9
    assert found["conv2"].tolist() == [0, 0, 0, 6.0 * rows / (rows + columns), 0]
    assert torch.allclose(found["conv1"], torch.full((4,), 6.0 * 9 / (9 + 5 * 9), dtype=torch.float64))
    assert unit_scores(zero, groups, "max")["conv2"].tolist() == [0, 0, 0, 6.0, 0]


def test_wrong_scores_amounts_and_groups_are_refused():
    model = built("simple_cnn")
    groups, units = trace(model).groups, {"conv1": torch.arange(4.)}
    for call, words in ((lambda: unit_scores({}, groups, "median"), "unknown how 'median'"),
                        (lambda: unit_scores({"conv1.weight": torch.full((4, 1, 3, 3), float("nan"))}, groups), "not all finite"),
                        (lambda: unit_scores({"conv1.weight": torch.ones(4, 2, 3, 3)[:3]}, groups), "conv1.weight"),
                        (lambda: unit_mask(units, groups, -0.1, model), "amount = -0.1"), (lambda: unit_mask(units, groups, 0.5, model, floor=0), "floor = 0"),
                        (lambda: unit_mask({"conv1": torch.arange(3.)}, groups, 0.5, model), "'conv1'"),
                        (lambda: unit_mask({"conv9": torch.arange(4.)}, groups, 0.5, model), "unknown group 'conv9'")):
        with pytest.raises(InputError, match=words.replace("(", r"\(")): call()


# ---- refusals

def test_a_wrong_mask_is_refused_in_one_sentence():
    model = built("simple_cnn")
    good = torch.ones_like(model.conv1.weight, dtype=torch.bool)
    for masks, words in (({"conv1.weigth": good}, "did you mean 'conv1.weight'"), ({"conv1.weight": good[:2]}, "has shape"), ({"conv1.weight": good.float()}, "torch.float32"),
                         ({"conv1.weight": good.byte()}, "torch.uint8"), ({"conv1.weight": [True]}, "list"), ([good], "list")):
        with pytest.raises(InputError) as e: shrink(model, masks=masks)
        assert words in str(e.value) and "\n" not in str(e.value)


def test_what_cannot_be_derived_is_refused():
    with seeded(0, "soft"): soft = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Softmax(1), nn.Flatten(), nn.Linear(4 * 36, 2))
    with pytest.raises(AdapterError, match="is not an operation that keeps channels apart"): shrink(soft, (1, 8, 8))
    with pytest.raises(InputError, match="input shape is not known"): shrink(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def test_files_that_are_not_a_smaller_model_are_refused(tmp_path):
    from safetensors.torch import save
    model = built("two_cnn")
    small = shrink(model, masks=unit_masks(model, model.input_shape, 1))
    save_small(small, tmp_path/"small")
    (tmp_path/"foreign").write_bytes(save({"w": torch.zeros(2)}))
    (tmp_path/"cut").write_bytes((tmp_path/"small").read_bytes()[:-5])
    record = {**json.loads(json.dumps(small.shrunk.__dict__)), "kept": {}}
    (tmp_path/"empty").write_bytes(save({"w": torch.zeros(2)}, metadata={"fedinterp.shrunk": json.dumps(record)}))
    for name, error, words in (("nowhere", RunError, "there is no file"), ("foreign", RunError, "no record"), ("cut", RunError, "damaged"), ("empty", RunError, "damaged")):
        with pytest.raises(error, match=words): load_small(tmp_path/name, model)
    with pytest.raises(InputError, match="the template has"): load_small(tmp_path/"small", build_model("two_cnn", hidden=4, features=7, grid=3, classes=3, size=12))
    with pytest.raises(InputError, match="does not fit the template"): load_small(tmp_path/"small", build_model("two_cnn", hidden=3, features=7, grid=3, classes=4, size=12))
    with pytest.raises(InputError, match="no record"): save_small(model, tmp_path/"x")
    with pytest.raises(StorageError, match="could not write"): save_small(small, tmp_path/"small"/"below")


def test_frozen_parameters_stay_frozen_and_random_state_is_left_alone():
    model, before = built("two_cnn"), torch.get_rng_state()
    model.conv1.weight.requires_grad_(False)
    small = shrink(model.train(), masks=unit_masks(model, model.input_shape, 1))
    assert (small.conv1.weight.requires_grad, small.conv2.weight.requires_grad, small.training) == (False, True, True)
    assert torch.get_rng_state().equal(before)
    assert all(p.equal(q) for p, q in zip(small.parameters(), shrink(model, masks=unit_masks(model, model.input_shape, 1)).parameters()))


def test_the_mask_and_the_smaller_model_agree_on_a_double_and_a_copy():
    model = built("resnet10").double()
    small = shrink(model, masks=unit_masks(model, model.input_shape, 4))
    assert small.fc.weight.dtype == torch.float64 and copy.deepcopy(small).shrunk == small.shrunk
