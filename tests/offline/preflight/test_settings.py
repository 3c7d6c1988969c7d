"""Each contradiction against a setting that makes it, and an ordinary job that makes none."""

import json

import pytest

from holter import offline
from holter.offline.preflight.settings import JobContext, look

ORDINARY = JobContext(
    environ={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2", "NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
    command=("torchrun", "--nproc-per-node", "2", "train.py", "--max-restarts", "3"), interfaces=frozenset({"lo", "eth0"}), num_cores=8,
)  # fmt: skip

ENVIRONMENTS = {
    "nccl": [{"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}, {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"},
             {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}],
    "temporary folder": [{"TMPDIR": "/" + "x" * 90}],
    "recorder": [{"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}],
    "cuda": [{"CUDA_LAUNCH_BLOCKING": "1"}],
    "debug": [{"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}],
    "devices": [{"CUDA_VISIBLE_DEVICES": "0"}],
    "threads": [{"OMP_NUM_THREADS": "64"}],
    "stale variables": [{"RANK": "0", "WORLD_SIZE": "4"}],
    "network": [{"NCCL_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "eth"}, {"NCCL_SOCKET_IFNAME": "lo", "NNODES": "2"}, {"NCCL_SOCKET_IFNAME": "lo"}],
    "rendezvous": [{"MASTER_ADDR": "localhost", "NNODES": "2"}],
    "attaching": [{"HOLTER": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}],
    "bytecode": [{"PYTHONDONTWRITEBYTECODE": "1"}],
    "action": [{"HOLTER_ACTION": "observe"}],
    "restarts": [{"PET_MAX_RESTARTS": "3"}],
}  # fmt: skip


def with_environment(**more: str) -> JobContext:
    return JobContext(
        environ={**ORDINARY.environ, **more}, command=ORDINARY.command, interfaces=ORDINARY.interfaces, num_cores=8
    )


def test_an_ordinary_job_is_silent():
    assert [] == look(ORDINARY)
    assert [] == look(JobContext(environ={}))


@pytest.mark.parametrize(("check", "environ"), [(check, one) for check, some in ENVIRONMENTS.items() for one in some])
def test_variables_that_contradict_each_other_are_said(check, environ):
    assert check in [one.check for one in look(with_environment(**environ))]


@pytest.mark.parametrize(
    ("check", "command"),
    [
        ("launcher", "accelerate launch --cpu --num_processes 2 train.py"),
        ("restarts", "torchrun --max-restarts=3 --nproc-per-node 2 train.py"),
        ("rendezvous", "torchrun --nnodes 2 --rdzv-endpoint localhost:29500 train.py"),
        ("launcher", "torchrun --nproc_per_node 4 train.py"),
        ("rendezvous", "torchrun --standalone --nnodes 2 train.py"),
    ],
)
def test_a_launcher_that_does_something_else_is_said(check, command):
    job = JobContext(environ={}, command=tuple(command.split()), num_devices=2)
    assert [check] == [one.check for one in look(job)]
    ours = JobContext(
        environ={},
        command=("holter", "launch", "--", *command.split()[:2], "--nproc-per-node", "2", "train.py"),
        num_devices=2,
    )
    assert [] == look(ours)


def job_with(tmp_path, name: str, text: str, **more) -> JobContext:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return JobContext(environ=more.pop("environ", {}), configs=tuple(offline.read([tmp_path / name]).configs), **more)


YAML = "compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nnum_machines: {machines}\nnum_processes: {ranks}\nmachine_rank: 0\nmixed_precision: bf16\n{more}"


def yaml(kind: str = "MULTI_GPU", machines: int = 1, ranks: int = 2, more: str = "") -> str:
    return YAML.format(kind=kind, machines=machines, ranks=ranks, more=more)


def test_an_ordinary_accelerate_config_is_silent(tmp_path):
    assert [] == look(job_with(tmp_path, "c.yaml", yaml()))
    assert [] == look(
        job_with(
            tmp_path,
            "d.yaml",
            yaml("DEEPSPEED", more="deepspeed_config:\n  zero_stage: 2\n  zero3_init_flag: false\nuse_cpu: true\n"),
        )
    )


@pytest.mark.parametrize(
    ("text", "environ", "word"),
    [
        (yaml("MULTI_CPU"), {}, "MULTI_CPU"), (yaml("NO"), {}, "one process"), (yaml("DEEPSPEED"), {"ACCELERATE_USE_CPU": "true"}, "plain DDP"),
        (yaml(machines=2, ranks=4), {}, "main_process_ip"), (yaml(machines=2, ranks=3, more="main_process_ip: 10.0.0.1\n"), {}, "evenly"),
        (yaml("FSDP", more="fsdp_config:\n  fsdp_cpu_ram_efficient_loading: true\n  fsdp_sync_module_states: false\n"), {}, "rank 0 alone"),
        (yaml(more="gpu_ids: '0'\n"), {}, "gpu_ids"), (yaml(more="max_restarts: 3\n"), {}, "restarts"),
        (yaml("DEEPSPEED", more="deepspeed_config:\n  zero_stage: 2\n  zero3_init_flag: true\n"), {}, "zero3_init_flag"),
    ],
)  # fmt: skip
def test_a_trap_in_an_accelerate_config_is_said(text, environ, word, tmp_path):
    found = look(job_with(tmp_path, "c.yaml", text, environ=environ))
    assert any(word in one.says for one in found), found


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 2}, "train_batch_size 48"),
        ({"zero_optimization": {"stage": 3}}, "save_16bit_model"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"train_batch_size": 16, "elasticity": {"enabled": True}}, "elasticity"),
        ({"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}, "state dict"),
    ],
)
def test_a_trap_in_a_deepspeed_config_is_said(content, word, tmp_path):
    whole = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}} | content
    command = ("deepspeed", "--num_gpus", "2", "train.py")
    found = look(job_with(tmp_path, "ds.json", json.dumps(whole), command=command, plain_save_line=12))
    assert any(word in one.says for one in found), found
    sound = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 32,
        "zero_optimization": {"stage": 2},
    }
    assert [] == look(job_with(tmp_path, "sound.json", json.dumps(sound), command=command, plain_save_line=12))


def test_two_configs_that_say_different_things_are_said(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml("DEEPSPEED"))
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 8, "fp16": {"enabled": True}}))
    job = JobContext(environ={}, configs=tuple(offline.read([tmp_path / "c.yaml", tmp_path / "ds.json"]).configs))
    assert any("mixed_precision: bf16" in one.says for one in look(job))


def test_hidden_devices_are_said():
    assert ["devices"] == [one.check for one in look(JobContext(environ={"CUDA_VISIBLE_DEVICES": ""}, num_devices=8))]
