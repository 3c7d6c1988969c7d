"""What a stack says its thread is doing: the innermost context, then whoever's code is innermost."""

import pytest

from holter.faults.hangs.activities import activity
from holter.records import Frame

SITE = "/opt/venv/lib/python3.11/site-packages/"
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
        Frame("write_whole", "/src/daemon/holter/files.py", 14),
        Frame("_run_code", "<frozen runpy>", 88),
        Frame("main", "/src/daemon/holter/__main__.py", 9),
    ]
    assert "unknown" == activity(own)
    assert "collective" == activity([own[0], installed(C10D, "all_reduce"), own[1], *MAIN])
