"A run folder: what damages it, who may write, what is kept."
import json, resource, signal
import numpy as np, pytest, torch
from fedinterp.core import Config, RunError, StorageError
from fedinterp.run import Run, RoundWriter, create, pack, trace_bytes, unpack, writing
from fedinterp.table import table


def metrics(r): return table([dict(round=r, client="server", metric="accuracy", value=0.5)])


@pytest.fixture
def run(tmp_path):
    run = create(tmp_path/"run", Config(clients=2, rounds=4), [np.array([0, 1]), np.array([2])], classes=["a", "b"])
    for r in range(3):
        writer = RoundWriter(run, r)
        for k in range(2 if r else 0): writer.client(k, pack({"w": torch.full((3,), r + 0.5 * k)}))
        writer.finish({"w": torch.full((3,), float(r))}, metrics(r), {"server/v": torch.ones(2)})
    return run


def test_a_run_reads_back_what_was_written(run):
    again = Run.open(run.path)
    assert (again.rounds, again.done, again.clients(2)) == ([0, 1, 2], 2, [0, 1])
    assert again.client(2, 1)["w"].tolist() == [2.5] * 3 and again.server(1)["w"].tolist() == [1.0] * 3
    assert [p.tolist() for p in again.partition] == [[0, 1], [2]]
    assert again.metrics()["round"].tolist() == [0, 1, 2]


def test_only_the_last_round_keeps_the_strategys_tensors(run):
    assert [p.parent.name for p in run.path.rglob("strategy.safetensors")] == ["0002"]


@pytest.mark.parametrize("damage", [
    lambda p: (p/"config.json").unlink(), lambda p: (p/"config.json").write_text("{"), lambda p: (p/"config.json").write_text('{"schema": 9}'),
    lambda p: (p/"run.json").write_text("oops"), lambda p: (p/"run.json").unlink(), lambda p: (p/"config.json").write_bytes(b"\xff\xfe\x00"),
])
def test_a_damaged_or_foreign_folder_is_refused_in_one_sentence(run, damage):
    damage(run.path)
    with pytest.raises(RunError) as error: Run.open(run.path)
    assert "\n" not in str(error.value) and str(run.path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04"])
def test_weights_that_are_truncated_or_not_safetensors_are_refused_and_never_unpickled(run, content):
    path = run.path/"rounds/0002/client_001.safetensors"
    whole = path.read_bytes()
    for wrong in (content, whole[:-1], whole[:20]):
        path.write_bytes(wrong)
        with pytest.raises(RunError, match="client_001"): run.client(2, 1)
    assert run.client(2, 0)["w"].tolist() == [2.0] * 3


def test_a_partition_or_metrics_file_that_is_damaged_is_named(run):
    (run.path/"partition.npz").write_bytes(b"PK")
    with pytest.raises(RunError, match="partition.npz"): run.partition
    (run.path/"rounds/0001/metrics.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="metrics.parquet"): run.metrics()


def test_a_round_without_done_does_not_exist(run):
    writer = RoundWriter(run, 3)
    writer.client(0, pack({"w": torch.ones(1)}))
    assert run.done == 2 and run.rounds == [0, 1, 2]
    (run.path/"rounds/0002/DONE").unlink()
    assert run.done == 1
    with pytest.raises(RunError): run.server(2)


def test_two_writers_exclude_each_other(run):
    with writing(run.path):
        with pytest.raises(RunError, match="another process"):
            with writing(run.path): pass
    with writing(run.path): pass


@pytest.mark.parametrize("trace, kept, clients", [("all", [0, 1, 2, 3, 4], [1, 2, 3, 4]), ("every:2", [0, 2, 4], [2, 4]), ("last", [0, 4], [4]), ("every:3/server", [0, 3, 4], [])])
def test_a_trace_policy_keeps_what_it_says_and_takes_the_bytes_it_said(tmp_path, trace, kept, clients):
    state = {"w": torch.zeros(2500)}
    run = create(tmp_path/"run", Config(clients=1, rounds=4), [np.array([0])], trace=trace)
    for r in range(5):
        writer = RoundWriter(run, r)
        if r: writer.client(0, pack(state))
        writer.finish(state, metrics(r))
    assert run.rounds == kept and [r for r in range(5) if run.clients(r)] == clients
    assert len(run.metrics()) == 5
    weights = sum(p.stat().st_size for p in run.path.rglob("*.safetensors"))
    assert abs(weights / trace_bytes(trace, 10_000, 4, 1) - 1) < 0.02


def test_a_disk_that_refuses_gives_a_sentence_and_loses_no_finished_round(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match="every finished round is still there"):
            RoundWriter(run, 3).finish({"w": torch.zeros(10_000)}, metrics(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert Run.open(run.path).done == 2
    RoundWriter(run, 3).finish({"w": torch.zeros(10_000)}, metrics(3))
    assert run.done == 3


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path/"file").write_text("")
    with pytest.raises(StorageError, match="could not write"): create(tmp_path/"file"/"run", Config(), [])


def test_states_that_share_memory_and_odd_dtypes_survive_packing():
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    state = {"w": w, "tied": w, "t": w.t(), "n": torch.tensor(3), "b": torch.tensor([True]), "h": w.bfloat16(), "e": torch.empty(0)}
    back = unpack(pack(state))
    assert all(back[k].equal(v) and back[k].dtype == v.dtype for k, v in state.items())


def test_an_analysis_is_computed_once_for_its_arguments_and_again_when_its_cache_is_damaged(run):
    calls = []
    compute = lambda: calls.append(1) or table([dict(metric="x", value=len(calls))])
    assert [run.cached("a", compute, budget=b).value[0] for b in (1, 1, 2)] == [1, 1, 2]
    next((run.path/"tables").glob("a-*")).write_bytes(b"")
    run.cached("a", compute, budget=1), run.cached("a", compute, budget=2)
    assert len(calls) == 3


def test_checkpoints_of_other_programs_become_a_run(tmp_path):
    run = Run.from_checkpoints(tmp_path/"mine", Config(), {0: {"w": torch.zeros(1)}, 7: {"w": torch.ones(1)}}, {(7, 2): {"w": torch.ones(1)}}, classes=["a"])
    assert (run.rounds, run.clients(7), [r.id for r in Run.list(tmp_path)]) == ([0, 7], [2], ["mine"])
    assert json.loads((run.path/"run.json").read_text())["classes"] == ["a"]
    with pytest.raises(ValueError, match="round 3"): Run.from_checkpoints(tmp_path/"no", Config(), {0: {}}, {(3, 0): {}})
    assert not (tmp_path/"no").exists()
