"""What a stack says its thread is doing; and many ranks' stacks as one tree that a person reads at night, whatever the number of ranks."""

from collections.abc import Sequence

import pytest

from holter.faults.hangs.stacks import MAX_LINES, activity, evidence, main_stack, merged, ranges
from holter.records import Exam, Frame, ThreadStack

SITE = "/opt/venv/lib/python3.11/site-packages/"
MODULE = Frame("<module>", "/home/me/train.py", 88)
WAITING = [
    Frame("0x7f5f130a3f16", "/usr/lib/x86_64-linux-gnu/libc.so.6", 0, is_native=True),
    Frame("pthread_cond_wait", "/usr/lib/x86_64-linux-gnu/libc.so.6", 0, is_native=True),
    Frame("c10d::Work::wait(std::chrono::duration<long>)", SITE + "torch/lib/libtorch_cpu.so", 0, is_native=True),
    Frame("all_reduce", SITE + "torch/distributed/distributed_c10d.py", 2900),
    Frame("wrapper", SITE + "torch/distributed/c10d_logger.py", 81),
    Frame("main", "/home/me/train.py", 61),
    Frame("run", SITE + "holter/rank/hooks/step.py", 5),
    MODULE,
]
SPINNING = [Frame("spin", "/home/me/train.py", 31), Frame("main", "/home/me/train.py", 64), MODULE]


def exam(frames: Sequence[Frame]) -> Exam:
    helper = ThreadStack("helper", False, True, True, [Frame("poll", "/home/me/other.py", 1)])
    return Exam(reason="asked", stacks=[helper, ThreadStack("MainThread", True, False, False, list(frames))])


def test_common_frames_are_said_once_and_who_is_elsewhere_is_seen() -> None:
    assert merged({0: WAITING, 1: SPINNING, 2: WAITING, 3: WAITING}) == [
        "all 4 ranks",
        "  <module> (/home/me/train.py:88)",
        "├─ ranks 0,2,3",
        "│    main (/home/me/train.py:61)",
        "│    all_reduce (torch/distributed/distributed_c10d.py:2900)",
        "│    c10d::Work::wait [native] (libtorch_cpu.so)",
        "│    pthread_cond_wait [native] (libc.so.6)",
        "└─ rank 1",
        "     main (/home/me/train.py:64)",
        "     spin (/home/me/train.py:31)",
    ]


def test_addresses_without_a_name_do_not_part_ranks() -> None:
    other = [Frame("0x7fb1ce84524a", WAITING[0].file, 0, is_native=True), *WAITING[1:]]
    assert not [line for line in merged({0: WAITING, 1: other}) if "─" in line]


def test_a_rank_that_stands_in_a_frame_others_went_through_is_a_branch() -> None:
    lines = merged({0: SPINNING, 1: SPINNING[1:]})
    assert lines[-2:] == ["└─ rank 1", "     here, in the frame above"]


def test_ranks_without_a_stack_are_said() -> None:
    assert "ranks 1,2: no stack" == merged({0: SPINNING, 1: [], 2: []})[-1]
    assert [] == merged({})


def test_ranks_are_ranges() -> None:
    assert ["", "3", "0,1", "0-2", "0,2,3,7-9"] == [
        ranges(ranks) for ranks in ([], [3], [0, 1], [2, 0, 1], [0, 2, 3, 7, 8, 9])
    ]
    assert ranges(range(0, 1000, 2)).endswith(",14,... (500 ranks)")


def test_sixteen_thousand_ranks_make_a_few_lines() -> None:
    stacks = dict.fromkeys(range(16_000), WAITING) | {4711: SPINNING}
    lines = merged(stacks)
    assert len(lines) < 12
    assert "├─ ranks 0-4710,4712-15999" in lines
    assert "└─ rank 4711" in lines


def test_as_many_places_as_ranks_stay_bounded() -> None:
    stacks = {rank: [Frame("spin", "/home/me/train.py", rank), MODULE] for rank in range(16_000)} | {5: WAITING}
    lines = merged(stacks)
    assert len(lines) < 30
    assert "├─ 15992 ranks in 15992 other places" in lines
    assert max(map(len, lines)) < 140


def test_deep_stacks_and_wide_trees_stay_bounded() -> None:
    deep = [Frame("recurse", "/home/me/train.py", line) for line in range(5000)]
    assert len(merged({0: deep, 1: deep})) < 30

    def path(rank: int) -> list[Frame]:
        return [Frame(f"f{rank >> bit & 7}", "/home/me/train.py", bit) for bit in range(12, -1, -3)]

    assert len(merged({rank: path(rank) for rank in range(2**14)})) <= MAX_LINES + 1


def test_long_names_are_cut() -> None:
    name = "std::map<" + "std::vector<int>, " * 50 + ">::operator[]"
    frames = [Frame(name, "libx.so", 0, is_native=True), Frame("f", "/very" * 40 + "/deep/train.py", 3)]
    lines = merged({0: frames})
    assert "  std::map::operator[] [native] (libx.so)" in lines
    assert "  f (.../very/deep/train.py:3)" in lines


def test_the_evidence_says_what_the_script_called_and_where() -> None:
    found = evidence({0: exam(WAITING), 1: exam(SPINNING), 2: exam(WAITING), 3: exam(WAITING)})
    assert found is not None
    assert ("stacks", "ranks 0,2,3 in all_reduce (/home/me/train.py:61); rank 1 in spin (/home/me/train.py:31)") == (
        found.kind,
        found.summary,
    )
    assert found.values["tree"][0] == "all 4 ranks"
    assert found.values["ranks"]["1"] == {
        "function": "spin",
        "file": "/home/me/train.py",
        "line": 31,
        "activity": "script",
    }
    assert "collective" == found.values["ranks"]["0,2,3"]["activity"]


def test_each_place_has_a_column_of_its_own() -> None:
    found = evidence({0: exam(WAITING), 1: exam(SPINNING), 2: exam(WAITING)})
    assert found is not None
    waiting, spinning = found.values["columns"]
    assert ("ranks 0,2", "rank 1") == (waiting["ranks"], spinning["ranks"])
    assert ["<module> (/home/me/train.py:88)", "main (/home/me/train.py:64)", "spin (/home/me/train.py:31)"] == (
        spinning["frames"]
    )
    assert "pthread_cond_wait [native] (libc.so.6)" == waiting["frames"][-1]


def test_a_column_is_bounded() -> None:
    deep = [Frame(f"f{number}", "/home/me/train.py", number) for number in range(500)]
    found = evidence({0: exam(deep)})
    assert found is not None
    assert len(found.values["columns"][0]["frames"]) < 30


def test_the_evidence_of_very_many_places_is_bounded_and_keeps_the_odd_one() -> None:
    exams = {rank: exam([Frame("spin", "/home/me/train.py", rank // 2), MODULE]) for rank in range(1000)}
    found = evidence(exams | {999: exam(WAITING)})
    assert found is not None
    assert "rank 999 in all_reduce" in found.summary
    assert "and 497 more places" in found.summary
    assert len(found.values["ranks"]) <= 16


def test_no_stack_is_no_evidence() -> None:
    assert evidence({}) is None
    assert evidence({0: Exam(reason="asked", stack_error="py-spy is not there")}) is None
    assert main_stack(Exam(reason="asked")) is None


STANDARD = "/usr/lib/python3.11/"
TORCH_SO = SITE + "torch/lib/libtorch_cpu.so"


def script(function: str, file: str = "/home/me/train.py", line: int = 7) -> Frame:
    return Frame(function, file, line)


def installed(file: str, function: str) -> Frame:
    return Frame(function, SITE + file, 1)


def standard(file: str, function: str) -> Frame:
    return Frame(function, STANDARD + file, 1)


def native(function: str) -> Frame:
    return Frame(function, TORCH_SO, 0, is_native=True)


MAIN = (script("main"), script("<module>"))
C10D = "torch/distributed/distributed_c10d.py"
WAIT = native("pthread_cond_wait")
LINEAR = (installed("torch/nn/modules/linear.py", "forward"), installed("torch/nn/modules/module.py", "_call_impl"))
DDP_FORWARD = (
    installed("torch/nn/parallel/distributed.py", "DistributedDataParallel._run_ddp_forward"),
    installed("torch/nn/parallel/distributed.py", "DistributedDataParallel.forward"),
)
COMPILED = (
    installed("torch/_dynamo/eval_frame.py", "_fn"),
    installed("torch/nn/modules/module.py", "_call_impl"),
    installed("torch/_dynamo/eval_frame.py", "OptimizedModule.__call__"),
)


@pytest.mark.parametrize(
    ("expected", "frames"),
    [
        ("collective", [installed(C10D, "all_reduce"), installed("torch/distributed/c10d_logger.py", "wrapper"), *MAIN]),
        ("collective", [WAIT, native("c10d::Reducer::finalize_backward"), installed("torch/autograd/graph.py", "x"), *MAIN]),
        ("collective", [WAIT, native("gloo::transport::tcp::UnboundBuffer::waitRecv"), *MAIN]),
        ("collective", [native("ncclGroupEndInternal"), *MAIN]),
        ("collective", [installed("torch/nn/parallel/distributed.py", "DistributedDataParallel._sync_buffers"), *MAIN]),
        ("collective", [installed(C10D, "barrier"), script("save_checkpoint"), *MAIN]),
        ("compile", [installed("torch/_inductor/codecache.py", "compile"), *COMPILED, *MAIN]),
        ("compile", [standard("subprocess.py", "wait"), installed("torch/_inductor/cpp_builder.py", "run"), *MAIN]),
        ("compile", [installed("sympy/core/add.py", "flatten"), installed("torch/_dynamo/convert_frame.py", "x"), *MAIN]),
        ("compile", [installed("torch/utils/file_baton.py", "wait"), installed("deepspeed/ops/builder.py", "load"), *MAIN]),
        ("checkpoint", [native("caffe2::serialize::PyTorchStreamWriter::writeRecord"), *MAIN]),
        ("checkpoint", [installed("torch/serialization.py", "_save"), *MAIN]),
        ("checkpoint", [installed("boto3/s3/transfer.py", "upload_file"), script("save_checkpoint"), *MAIN]),
        ("checkpoint", [installed("transformers/modeling_utils.py", "PreTrainedModel.save_pretrained"), *MAIN]),
        ("checkpoint", [installed("accelerate/accelerator.py", "Accelerator.save_state"), *MAIN]),
        ("evaluation", [script("forward", "/home/me/model.py"), *LINEAR, script("evaluate"), *MAIN]),
        ("evaluation", [*LINEAR, installed("transformers/trainer.py", "Trainer.evaluation_loop"), *MAIN]),
        ("evaluation", [standard("threading.py", "wait"), script("run_validation"), *MAIN]),
        ("data", [script("Corpus.__getitem__"), installed("torch/utils/data/_utils/fetch.py", "fetch"), *MAIN]),
        ("data", [standard("selectors.py", "select"), installed("torch/utils/data/dataloader.py", "_try_get_data"), *MAIN]),
        ("data", [installed("torch/utils/data/dataloader.py", "__next__"), script("evaluate"), *MAIN]),
        ("library", [standard("cmd.py", "Cmd.cmdloop"), standard("pdb.py", "Pdb.interaction"), script("train"), *MAIN]),
        ("library", [standard("pdb.py", "Pdb.interaction"), installed("torch/distributed/__init__.py", "breakpoint"), *MAIN]),
        ("library", [installed("debugpy/_vendored/pydevd/pydevd.py", "do_wait_suspend"), script("train"), *MAIN]),
        ("library", [standard("ssl.py", "SSLSocket.read"), installed("requests/api.py", "put"), *MAIN]),
        ("library", [standard("subprocess.py", "Popen.wait"), *MAIN]),
        ("library", [standard("shutil.py", "copyfileobj"), *MAIN]),
        ("library", [installed("wandb/sdk/run.py", "Run.log"), *MAIN]),
        ("library", [native("wait4"), native("do_system"), native("os_system"), *MAIN]),
        ("library", [native("fsync"), *MAIN]),
        ("library", [native("write"), *MAIN]),
        ("library", [standard("multiprocessing/pool.py", "map"), *MAIN]),
        ("library", [installed(C10D, "_object_to_tensor"), installed(C10D, "broadcast_object_list"), *MAIN]),
        ("checkpoint", [native("write"), script("save_checkpoint"), *MAIN]),
        ("compute", [native("mkl_blas_def_sgemv"), native("at::native::svd_kernel"), script("merge"), *MAIN]),
        ("compute", [script("call", "/cache/torchinductor_me/ab/cab.py"), script("forward", "/home/me/model.py"), *MAIN]),
        ("collective", [native("gloo::allreduce"), native("c10d::ops::all_reduce"), native("at::_ops::x::call"), *MAIN]),
        ("script", [native("cudaStreamSynchronize"), native("at::native::_local_scalar_dense_cuda"), *MAIN]),
        ("script", [native("cudaStreamSynchronize"), native("at::_ops::item::call"), *MAIN]),
        ("script", [script("hook"), native("at::_ops::mm::call"), *MAIN]),
        ("evaluation", [script("decode"), script("sample_images"), *MAIN]),
        ("evaluation", [script("upload_artifacts"), *MAIN]),
        ("evaluation", [script("log_validation_images"), *MAIN]),
        ("script", [script("log_prob"), *MAIN]),
        ("script", [script("sample_timesteps"), *MAIN]),
        ("script", [native("clock_nanosleep"), script("spin"), *MAIN]),
        ("script", [standard("threading.py", "Condition.wait"), standard("queue.py", "Queue.get"), *MAIN]),
        ("script", [*LINEAR, *DDP_FORWARD, *MAIN]),
        ("script", [*LINEAR, *COMPILED, *MAIN]),
        ("script", [script("forward"), *DDP_FORWARD, *MAIN]),
        ("script", [script("hook"), native("c10d::Reducer::run_comm_hook"), *MAIN]),
        ("script", [script("forward"), installed("torch/utils/checkpoint.py", "checkpoint"), *MAIN]),
        ("script", [script("checkpointed_forward"), *MAIN]),
        ("script", [script("train_and_evaluate"), *MAIN]),
        ("script", [script("saver_thread_count"), *MAIN]),
        ("script", [script("x", "/home/me/holter/train.py")]),
        ("unknown", []),
        ("unknown", [WAIT]),
    ],
)  # fmt: skip
def test_a_stack_is_read_from_the_inside_out(expected: str, frames: list[Frame]) -> None:
    assert expected == activity(frames)


def test_frames_of_holter_are_skipped() -> None:
    own = [
        Frame("wrapped", SITE + "holter/rank/hooks/step.py", 3),
        Frame("backward", "/src/daemon/holter/rank/hooks/backward.py", 9),
        Frame("write_whole", "/src/daemon/holter/files.py", 9),
        Frame("_run_code", "<frozen runpy>", 88),
        Frame("main", "/src/daemon/holter/__main__.py", 9),
    ]
    assert "unknown" == activity(own)
    assert "collective" == activity([own[0], installed(C10D, "all_reduce"), own[1], *MAIN])
