import math
from dataclasses import dataclass
import numpy as np, pandas as pd, pytest, torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from fedinterp.core import Config, InputError, nbytes, register, rng_for, seeded, torch_rng, weighted_mean
from fedinterp.cost import METRICS, account, apply_masks, check_masks, cost, images_seen, latency, one_input, payload, to_target, total, traffic
from fedinterp.local import batches
from fedinterp.models import build_model
from fedinterp.run import RoundWriter, create
from fedinterp.strategy import Strategy
from fedinterp.train import cohort, train


pytestmark = pytest.mark.filterwarnings("ignore:TF32")


def counter(model, shape=None, kernel=True):
    with torch.backends.mkldnn.flags(enabled=kernel), FlopCounterMode(display=False) as c, torch.no_grad(): model.eval()(one_input(model, shape))
    return c.get_total_flops()


LAYERS = {"conv": (lambda: nn.Conv2d(3, 5, 3, padding=1), (3, 7, 9)), "strided": (lambda: nn.Conv2d(3, 5, 3, 2), (3, 8, 8)), "dilated": (lambda: nn.Conv2d(3, 5, (3, 1), dilation=2), (3, 8, 8)),
          "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 8, 8)), "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (4, 8, 8)),
          "conv1d": (lambda: nn.Conv1d(3, 5, 3), (3, 9)), "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 5, 6)), "linear": (lambda: nn.Linear(7, 5), (7,)),
          "linear over positions": (lambda: nn.Linear(7, 5, bias=False), (4, 7)), "several": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)), (1, 8, 8))}


@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_and_linear_layers_cost_what_the_counter_says(name):
    make, shape = LAYERS[name]
    with seeded(0, name): model = nn.Sequential(make())
    bill = cost(model, shape)
    assert total(bill) == total(bill, "FLOPs dense") == counter(model, shape) == 2 * total(bill, "MACs")
    assert total(bill, "params") == sum(p.numel() for p in model.parameters())
    assert total(bill, "bytes") == nbytes(model.state_dict())


@pytest.mark.parametrize("kw", [dict(num_layers=1), dict(num_layers=3), dict(num_layers=2, bidirectional=True), dict(num_layers=2, bias=False)])
def test_an_lstm_costs_what_the_counter_says_where_it_can_see_it(kw):
    with seeded(0, "lstm"): model = nn.LSTM(5, 7, batch_first=True, **kw)
    assert total(cost(model, (11, 5))) == counter(model, (11, 5), kernel=False)
    if kw == dict(num_layers=1): assert total(cost(model, (11, 5))) == 11 * 8 * 7 * (5 + 7)


def test_a_layer_that_is_called_twice_works_twice_and_is_counted_once():
    class Twice(nn.Module):
        def __init__(self): super().__init__(); self.a = nn.Linear(4, 4)
        def forward(self, x): return self.a(self.a(x))
    with seeded(0, "twice"): twice, tied = Twice(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert total(cost(twice, (4,))) == counter(twice, (4,)) == 2 * 2 * 16
    tied[1].weight = tied[0].weight
    bill = cost(tied, (4,))
    assert total(bill) == counter(tied, (4,)) and total(bill, "params") == 16 + 4 + 4 == sum(p.numel() for p in tied.parameters())


def test_the_sites_of_a_bill_add_up():
    for name in ("simple_cnn", "resnet10", "two_cnn", "char_lstm"):
        bill = cost(build_model(name))
        sums = bill[bill.site != "all"].groupby("metric").value.sum()
        assert all(sums[m] == total(bill, m) for m in METRICS)
        assert not bill.duplicated(["site", "metric"]).any()


def test_elementwise_work_is_counted_apart():
    with seeded(0, "e"): net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    assert total(cost(net, (1, 8, 8)), "FLOPs elementwise") == 4 * 36 + 2 * 4 * 36 + 3
    with seeded(0, "l"): lstm = nn.LSTM(5, 7, batch_first=True)
    assert total(cost(lstm, (11, 5)), "FLOPs elementwise") == 11 * 9 * 7


def test_sparse_flops_are_two_per_nonzero_and_position():
    model = build_model("simple_cnn", size=8, channels=(4, 5, 6))
    masks = {n: torch.rand(p.shape, generator=torch_rng(0, n)) < 0.4 for n, p in model.named_parameters()}
    bill, positions = cost(model, masks=masks), {"conv1": 64, "conv2": 16, "conv3": 4, "fc": 1}
    for site, n in positions.items(): assert total(bill, "FLOPs sparse", site) == 2 * int(masks[f"{site}.weight"].sum()) * n
    assert total(bill, "nonzero") == sum(int(m.sum()) for m in masks.values())
    zeroed = cost(apply_masks(model, masks))
    assert zeroed.equals(bill)
    assert total(bill) == total(cost(model)) == total(bill, "FLOPs dense")


def test_a_bill_leaves_the_model_as_it_was():
    model = build_model("resnet10", channels_in=1).train()
    model.bn1.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    cost(model)
    assert (model.training, model.bn1.training) == (True, False)
    assert all(before[k].equal(v) for k, v in model.state_dict().items())
    assert sum(len(m._forward_hooks) for m in model.modules()) == 0


def test_what_cannot_be_counted_is_refused():
    for model, shape, words in ((nn.MultiheadAttention(4, 2), (3, 4), "MultiheadAttention"), (nn.GRU(4, 2), (3, 4), "GRU"), (nn.ConvTranspose2d(1, 2, 2), (1, 4, 4), "ConvTranspose2d"),
                                (nn.Linear(4, 2), None, "input shape is not known")):
        with pytest.raises(InputError, match=words): cost(nn.Sequential(model), shape)


def test_a_wrong_mask_is_refused_in_one_sentence():
    model = build_model("simple_cnn", size=8, channels=(4, 5, 6))
    good = torch.ones_like(model.conv2.weight, dtype=torch.bool)
    assert check_masks(model, {"conv2.weight": good})["conv2.weight"] is good
    for masks, words in (({"conv2.wieght": good}, "did you mean 'conv2.weight'"), ({"conv2.weight": good[:1]}, "shape"), ({"conv2.weight": good.int()}, "torch.int32"),
                         ({"conv2.weight": good.numpy()}, "ndarray"), (good, "Tensor")):
        for call in (cost, lambda m, masks: apply_masks(m, masks), lambda m, masks: check_masks(m, masks)):
            with pytest.raises(InputError) as e: call(model, masks=masks)
            assert words in str(e.value) and "\n" not in str(e.value)


def test_latency_has_ordered_intervals_and_leaves_modes_and_threads_alone():
    a, b = build_model("simple_cnn", size=8, channels=(4, 4, 4)), build_model("simple_cnn", size=8, channels=(8, 8, 8)).eval()
    threads = torch.get_num_threads()
    times = latency({"a": a, "b": b}, batch=4, repeats=3)
    assert times.groupby("metric").run.apply(list).to_dict() == {"latency": ["a", "b"], "latency ratio": ["a", "b"]}
    assert ((0 < times.lo) & (times.lo <= times.value) & (times.value <= times.hi)).all() and set(times.n) == {3}
    assert times[(times.metric == "latency ratio") & (times.run == "a")][["lo", "value", "hi"]].values.tolist() == [[1.0, 1.0, 1.0]]
    assert (a.training, b.training, torch.get_num_threads()) == (True, False, threads)
    with pytest.raises(InputError, match="repeats = 0"): latency(a, repeats=0)


def test_a_message_is_the_shorter_of_dense_and_sparse():
    for seed, density in enumerate((0.0, 0.1, 0.5, 0.9, 0.98, 1.0)):
        state = {"w": torch.zeros(33, 7), "b": torch.zeros(5), "count": torch.tensor(3)}
        masks = {"w": torch.rand(33, 7, generator=torch_rng(seed, "m")) < density}
        nnz, n = int(masks["w"].sum()) + 5, 33 * 7 + 5
        assert payload(state, masks) == min(4 * n, 4 * nnz + math.ceil(n / 8)) + 8
        assert payload(state, masks, bitmap=False) == 4 * nnz + 8
    assert payload(state) == payload(state, {}) == nbytes(state)
    half = {"w": torch.zeros(8, dtype=torch.float16)}
    assert payload(half, {"w": torch.arange(8) < 2}) == 2 * 2 + 1


def test_a_bitmap_goes_down_only_when_the_mask_is_news():
    state, one, other = {"w": torch.zeros(80)}, {"w": torch.arange(80) < 20}, {"w": torch.arange(80) < 19}
    both = lambda *a, **kw: traffic(state, *a, **kw).set_index("metric").value.to_dict()
    assert both(one) == {"bytes down": 90, "bytes up": 80}
    assert both(one, one) == {"bytes down": 80, "bytes up": 80}
    assert both(other, one) == {"bytes down": 86, "bytes up": 76}
    assert both() == both(one, explore=True) == {"bytes down": 320, "bytes up": 320}


def test_images_seen_are_those_of_the_batches_that_are_drawn():
    for n in (1, 2, 9, 10, 11, 25):
        for steps in (1, 2, 3, 7):
            config = Config(batch_size=10, local_steps=steps)
            drawn = sum(len(b) for b in batches(np.arange(n), config, rng_for(0, "draw")))
            assert images_seen(n, steps, 10) == drawn


# ---- the account of a run

SHARES = (0.5, 0.4, 0.4, 0.25, 0.25)  # what is kept after each round; the mask is news in rounds 1, 2 and 4


def half_masks(share): return {"conv2.weight": torch.rand((4, 4, 3, 3), generator=torch_rng(0, "half")) < share, "conv2.bias": torch.tensor([True, False, True, True])}


@dataclass(frozen=True)
class Half(Strategy):
    "Nested masks of one layer, among the server's tensors."
    def masked(self, weights, at):
        masks = half_masks(SHARES[at])
        return {n: v.masked_fill(~masks[n], 0) if n in masks else v for n, v in weights.items()}, {"at": torch.tensor(at), **{f"mask/{n}": m for n, m in masks.items()}}
    def explore(self, weights, server, visit): return self.masked(weights, 0)
    def local_grad(self, grads, local):
        masks = {n.removeprefix("mask/"): m for n, m in local.server.items() if n.startswith("mask/")}
        return grads, lambda theta: [theta[n].masked_fill_(~m, 0) for n, m in masks.items()]
    def aggregate(self, weights, uploads, server):
        return self.masked(weighted_mean([u.weights for u in uploads], [u.weight for u in uploads]), int(server["at"]) + 1)


register("strategy", "half", Half)


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    config, root = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=4, local_epochs=1.5, batch_size=16, partition="dirichlet:0.5"), tmp_path_factory.mktemp("runs")
    made = {name: train(config.replace(strategy=name), root, data=tiny, progress=False, workers=1) for name in ("fedavg", "fedprox", "half")}
    return made | {"half, two a round": train(config.replace(strategy="half", participation=0.5), root, data=tiny, progress=False, workers=1),
                   "half, last": train(config.replace(strategy="half"), root/"last", data=tiny, progress=False, workers=1, trace="last")}


def column(frame, metric, of="value"): return frame[frame.metric == metric][of].tolist()


def test_a_dense_run_costs_the_same_under_every_dense_strategy(runs, config):
    spent, model = account(runs["fedavg"]), runs["fedavg"].model()
    n = [len(p) for p in runs["fedavg"].partition]
    images = sum(images_seen(k, max(1, round(1.5 * math.ceil(k / 16))), 16) for k in n)
    forward, size = total(cost(model)), nbytes(model.state_dict())
    for metric in ("FLOPs", "FLOPs dense", "FLOPs sparse"): assert column(spent, metric) == [0] + [3 * forward * images] * 4
    assert column(spent, "bytes up") == column(spent, "bytes down") == [0] + [4 * size] * 4
    assert column(spent, "bytes", "total") == [0, 8 * size, 16 * size, 24 * size, 32 * size]
    assert spent.drop(columns="run").equals(account(runs["fedprox"]).drop(columns="run"))


def test_masks_of_earlier_rounds_are_read_from_the_zeros(runs):
    run, state = runs["half"], runs["half"].server()
    spent, up = account(run), [4 * payload(state, half_masks(share), bitmap=False) for share in SHARES[:4]]
    assert column(spent, "bytes up")[1:] == up and up[0] > up[1] == up[2] > up[3]
    news = [True, True, False, True]
    floats = sum(v.numel() for v in state.values())
    assert [d - u for d, u in zip(column(spent, "bytes down")[1:], up)] == [4 * math.ceil(floats / 8) if new else 0 for new in news]
    assert column(spent, "bytes") == [d + u for d, u in zip(column(spent, "bytes down"), column(spent, "bytes up"))]
    assert spent[spent.metric == "bytes"]["mask"].tolist() == ["dense"] + ["zeros"] * 4
    assert all(a <= b <= c for a, b, c in zip(column(spent, "FLOPs sparse"), column(spent, "FLOPs"), column(spent, "FLOPs dense")))
    assert column(spent, "FLOPs sparse")[1] < column(spent, "FLOPs dense")[1]


def test_masks_that_were_kept_and_masks_read_from_zeros_give_one_account(runs, tmp_path):
    run = runs["half"]
    kept = create(tmp_path/"kept", run.config, run.partition, **{k: run.info[k] for k in ("classes", "input_shape")})
    for r in range(5):
        masks = {f"server/mask/{n}": m for n, m in half_masks(SHARES[r]).items()}
        RoundWriter(kept, r).finish(run.server(r), run.metrics().query("round == @r").drop(columns="run"), masks)
        for old in kept.path.glob("rounds/*/strategy.safetensors"): old.with_suffix(".bak").write_bytes(old.read_bytes())
    for old in kept.path.glob("rounds/*/strategy.bak"): old.with_suffix(".safetensors").write_bytes(old.read_bytes())
    a, b = account(run), account(kept)
    assert set(b[b["round"] > 0]["mask"]) == {"kept"}
    assert a.drop(columns=["run", "mask"]).equals(b.drop(columns=["run", "mask"]))


def test_a_client_that_was_away_gets_the_bitmap_it_has_missed(runs):
    run = runs["half, two a round"]
    spent, state, known, expected = account(run), run.server(), {}, []
    for r in range(1, 5):
        news = 0
        for k in cohort(run.config, r):
            seen, known[k] = known.get(k), SHARES[r - 1]
            news += seen != known[k]
        expected.append(news * math.ceil(sum(v.numel() for v in state.values()) / 8))
    assert [d - u for d, u in zip(column(spent, "bytes down")[1:], column(spent, "bytes up")[1:])] == expected


def test_a_coarse_trace_never_flatters(runs):
    fine, coarse = account(runs["half"]), account(runs["half, last"])
    assert coarse[coarse.metric == "bytes"]["mask"].tolist() == ["dense", "zeros"] + ["carried"] * 3
    for metric in ("FLOPs", "FLOPs sparse", "bytes up"): assert all(a >= b for a, b in zip(column(coarse, metric), column(fine, metric)))


def test_exploration_is_charged_in_round_0_and_in_every_total(runs, tmp_path):
    run = runs["half"]
    charged = create(tmp_path/"charged", run.config, run.partition, **{k: run.info[k] for k in ("classes", "input_shape")})
    rows = pd.DataFrame([dict(round=0, client=str(k), cls="all", site="model", metric=m, value=v, n=9) for k in (0, 2) for m, v in (("explore samples", 20), ("explore steps", 5))])
    for r in range(5):
        mine = run.metrics().query("round == @r").drop(columns="run")
        masks = {f"server/mask/{n}": m for n, m in half_masks(SHARES[r]).items()}
        RoundWriter(charged, r).finish(run.server(r), pd.concat([mine, rows]) if r == 0 else mine, masks)
    with_it, without = account(charged), account(run)
    work, size = 3 * total(cost(run.model())) * 2 * images_seen(20, 5, 16), nbytes(run.server())
    assert [a - b for a, b in zip(column(with_it, "FLOPs", "total"), column(without, "FLOPs", "total"))] == [work] * 5
    assert [a - b for a, b in zip(column(with_it, "bytes up", "total"), column(without, "bytes up", "total"))] == [2 * size] * 5
    assert [a - b for a, b in zip(column(with_it, "bytes down", "total"), column(without, "bytes down", "total"))] == [2 * size] * 5


def test_an_account_is_repeatable_and_changes_nothing(runs):
    run, before = runs["half"], torch.get_rng_state()
    files = sorted(str(p) for p in run.path.rglob("*"))
    assert account(run).equals(account(run))
    assert files == sorted(str(p) for p in run.path.rglob("*")) and torch.get_rng_state().equal(before)


def test_a_module_of_ones_own_is_accounted_with_a_template(tiny, tmp_path):
    with seeded(0, "own"): own = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    own.input_shape = (1, 8, 8)
    config = Config(dataset="tiny", model="mine", clients=2, rounds=1, partition="iid", batch_size=16)
    run = train(config, tmp_path, data=tiny, model=own, progress=False, workers=1)
    assert column(account(run, own), "FLOPs")[1] == 3 * 2 * 64 * 4 * 160 * config.local_epochs
    del own.input_shape
    with pytest.raises(InputError, match="give input_shape"): account(run, own)
    assert account(run, own, input_shape=(1, 8, 8))["value"].tolist() == account(run, own, input_shape=(1, 8, 8), beside=lambda r: 0)["value"].tolist()
    more = account(run, own, input_shape=(1, 8, 8), beside=lambda r: 100 * r)
    assert [a - b for a, b in zip(column(more, "bytes up"), column(account(run, own, input_shape=(1, 8, 8)), "bytes up"))] == [0, 200]


def test_a_target_is_reached_in_the_first_round_that_has_it_or_not_at_all(runs):
    spent, run = account(runs["half"]), runs["half"]
    accuracy = run.metrics().query("metric == 'accuracy' and client == 'server' and cls == 'all'")
    best = float(accuracy.value.max())
    found = to_target(spent, run.metrics(), best).set_index("metric")
    at = int(accuracy[accuracy.value >= best]["round"].min())
    assert found.value["rounds"] == at and found.reached["rounds"] == f"in round {at}"
    assert found.value["bytes"] == spent[(spent.metric == "bytes") & (spent["round"] <= at)].value.sum()
    never = to_target(spent, accuracy, min(1.0, best + 0.001))
    assert never.value.isna().all() and set(never.reached) == {"not reached"} and set(never.metric) == set(found.index)
    with pytest.raises(InputError, match="target = 60"): to_target(spent, accuracy, 60)
