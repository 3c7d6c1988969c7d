"""Finds settings of a job that contradict each other or mislead: environment, accelerate's YAML, DeepSpeed's JSON, the launcher's options. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from holter.offline.found import Config
from holter.offline.preflight.record import PreflightCheck, failed, warned

MAX_TEMPORARY = 80
"""Number of characters of TMPDIR, in which files get names of their own."""
Fail = Callable[[str, str, str], PreflightCheck]
"""Takes a setting's name, what it does, and what to do about it."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_LOCAL = re.compile(r"^(localhost|127\.|::1|\[::1\]|0\.0\.0\.0)")


@dataclass(frozen=True)
class JobContext:
    """The environment, configs and command with which a job would be started."""

    environ: Mapping[str, str]
    configs: tuple[Config, ...] = ()
    command: tuple[str, ...] = ()
    """The launcher and its arguments; empty if unknown."""
    interfaces: frozenset[str] = frozenset()
    """Network interfaces of this machine; empty if unknown."""
    num_devices: int | None = None
    """Number of GPUs of this machine; None if unknown."""
    num_cores: int = 1
    plain_save_line: int = 0
    """Line on which the script saves a module's own state dict; 0 if there is none, or no script."""

    def is_on(self, name: str) -> bool:
        """Whether an environment variable is set to a true value."""
        return self.environ.get(name, "").strip().lower() in _TRUE

    def number(self, name: str) -> int | None:
        """Return an environment variable as a number; None if it is not set or no number."""
        return _number(self.environ.get(name, ""))

    def option(self, *names: str) -> str:
        """Return the value of a launcher's option; empty if it is not given.

        `--nnodes 2` and `--nnodes=2` are read, with dashes or underscores.
        """
        wanted = {name.replace("-", "_") for name in names}
        words = self.command[: self.command.index("--") + 1] if "--" in self.command else self.command
        for place, word in enumerate(words):
            if word.endswith(".py"):
                break
            head, equals, value = word.partition("=")
            if head.startswith("-") and head.lstrip("-").replace("-", "_") in wanted:
                following = words[place + 1] if place + 1 < len(words) else ""
                return value if equals else "true" if not following or following.startswith("-") else following
        return ""

    def named_configs(self) -> list[str]:
        """Return the config files that are named in the launcher's options."""
        options = ("config_file", "deepspeed_config_file", "deepspeed_config", "deepspeed")
        return [name for option in options if (name := self.option(option)) not in {"", "true"}]

    def values(self, kind: str) -> Iterator[tuple[Config, Mapping[str, str]]]:
        """Yield the configs of one kind with their values."""
        yield from ((config, config.values) for config in self.configs if config.kind == kind)

    @property
    def num_nodes(self) -> int:
        """Number of machines according to the command, environment or configs; 1 if none of them says it."""
        said = [
            _number(self.option("nnodes", "num_machines").split(":")[0]),
            self.number("NNODES"),
            self.number("SLURM_NNODES"),
            self.number("PET_NNODES"),
        ]
        said += [_number(values.get("num_machines", "")) for _, values in self.values("accelerate")]
        return max((one for one in said if one), default=1)

    @property
    def local_ranks(self) -> int:
        """Number of ranks on this machine according to the command, environment or configs; 1 if none of them says it."""
        said = [
            _number(self.option("nproc_per_node", "nproc-per-node", "num_gpus")),
            self.number("LOCAL_WORLD_SIZE"),
            self.number("PET_NPROC_PER_NODE"),
        ]
        all_ranks = [
            _number(self.option("num_processes")),
            *(_number(values.get("num_processes", "")) for _, values in self.values("accelerate")),
        ]
        said += [one // self.num_nodes for one in all_ranks if one]
        return max((one for one in said if one), default=1)


def look(job: JobContext) -> list[PreflightCheck]:
    """Return a result for every setting that contradicts another or misleads."""
    return [
        *_names(job),
        *_environment(job),
        *_networks(job),
        *_attaching(job),
        *_restarts(job),
        *_launcher(job),
        *_accelerate(job),
        *_deepspeed(job),
    ]


def _environment(job: JobContext) -> Iterator[PreflightCheck]:  # noqa: C901 - one condition a contradiction
    env = job.environ
    blocking = job.is_on("TORCH_NCCL_BLOCKING_WAIT") or job.is_on("NCCL_BLOCKING_WAIT")
    handling = env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", env.get("NCCL_ASYNC_ERROR_HANDLING", ""))
    if blocking and handling.strip() in {"1", "2", "3"}:
        yield failed(
            "nccl",
            "TORCH_NCCL_BLOCKING_WAIT and TORCH_NCCL_ASYNC_ERROR_HANDLING are both on: only one of them takes effect",
            "Unset TORCH_NCCL_BLOCKING_WAIT.",
        )
    if handling.strip() == "0" and not blocking:
        yield warned(
            "nccl", "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a rank that waits for a dead one waits for ever", "Unset it."
        )
    size = env.get("TORCH_FR_BUFFER_SIZE", env.get("TORCH_NCCL_TRACE_BUFFER_SIZE", ""))
    if size.strip() == "0":
        told = " although TORCH_NCCL_DUMP_ON_TIMEOUT is on" if job.is_on("TORCH_NCCL_DUMP_ON_TIMEOUT") else ""
        yield failed(
            "recorder",
            f"the Flight Recorder is off (a buffer of 0){told}: hangs and mismatched collectives cannot be explained",
            "Unset TORCH_FR_BUFFER_SIZE and TORCH_NCCL_TRACE_BUFFER_SIZE.",
        )
    if job.is_on("NCCL_IB_DISABLE") and (env.get("NCCL_IB_HCA") or env.get("NCCL_NET", "").upper() == "IB"):
        yield failed(
            "nccl", "NCCL_IB_DISABLE is on, and NCCL_IB_HCA or NCCL_NET asks for InfiniBand", "Keep one of them."
        )
    if job.is_on("NCCL_P2P_DISABLE") and env.get("NCCL_P2P_LEVEL"):
        yield failed("nccl", "NCCL_P2P_DISABLE is on, so NCCL_P2P_LEVEL takes no effect", "Keep one of them.")
    if job.is_on("NCCL_P2P_DISABLE") and job.is_on("NCCL_SHM_DISABLE"):
        yield warned(
            "nccl",
            "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE are both on: ranks of one host talk over the network",
            "Unset one of them.",
        )
    if job.is_on("CUDA_LAUNCH_BLOCKING"):
        yield warned(
            "cuda",
            "CUDA_LAUNCH_BLOCKING is on: every kernel is waited for, steps are several times slower",
            "Unset it, unless you look for a fault.",
        )
    if env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield warned(
            "debug",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL costs milliseconds at every collective",
            "Unset it: holter compares what ranks call.",
        )
    visible = [one for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    if "CUDA_VISIBLE_DEVICES" in env and 0 < len(visible) < job.local_ranks:
        yield failed(
            "devices",
            f"CUDA_VISIBLE_DEVICES names {len(visible)} devices, and {job.local_ranks} ranks are to run here",
            "Name as many as there are ranks.",
        )
    threads = job.number("OMP_NUM_THREADS")
    if threads and job.local_ranks > 1 and threads * job.local_ranks > 2 * job.num_cores:
        yield warned(
            "threads",
            f"OMP_NUM_THREADS={threads} for {job.local_ranks} ranks is {threads * job.local_ranks} threads on {job.num_cores} cores",
            f"Set OMP_NUM_THREADS={max(1, job.num_cores // job.local_ranks)}.",
        )
    stale = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in env]
    if stale and job.command and "TORCHELASTIC_RUN_ID" not in env:
        yield warned(
            "stale variables",
            f"{', '.join(stale)} of an earlier job or a shell are set: scripts without a launcher believe them",
            f"unset {' '.join(stale)}",
        )


def _names(job: JobContext) -> Iterator[PreflightCheck]:
    """Find old and new names of one setting with different values, hidden devices, and a temporary folder whose name is too long."""
    for old in ("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG"):
        said, new = job.environ.get(old), job.environ.get(f"TORCH_{old}")
        if said is not None and new is not None and said != new:
            yield warned(
                "nccl",
                f"{old}={said} and TORCH_{old}={new} mean the same setting: the newer name wins",
                f"Unset {old}.",
            )
    if job.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in {"", "-1"} and job.num_devices:
        yield warned(
            "devices",
            f"CUDA_VISIBLE_DEVICES hides all {job.num_devices} GPUs of this machine",
            "Unset it, unless the job is meant for CPUs.",
        )
    folder = job.environ.get("TMPDIR", "")
    if len(folder) > MAX_TEMPORARY:
        yield failed(
            "temporary folder",
            f"TMPDIR has {len(folder)} characters: sockets of loaders' workers cannot be made there (108 is the most for a whole path)",
            "Set a shorter one.",
        )
    if job.option("standalone") and job.num_nodes > 1:
        yield failed(
            "rendezvous",
            f"--standalone meets on one machine, and the job runs on {job.num_nodes}",
            "Give --rdzv-backend c10d and --rdzv-endpoint instead.",
        )


def _networks(job: JobContext) -> Iterator[PreflightCheck]:
    env = job.environ
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        said = env.get(name, "")
        wanted = [one.split(":")[0] for one in said.lstrip("=").split(",") if one]
        is_exact = name != "NCCL_SOCKET_IFNAME" or said.startswith("=")
        missing = [
            one
            for one in wanted
            if not any(there == one or (not is_exact and there.startswith(one)) for there in job.interfaces)
        ]
        if said and not said.startswith("^") and job.interfaces and len(missing) == len(wanted):
            yield failed(
                "network",
                f"{name}={said}: this machine has no such interface; it has {', '.join(sorted(job.interfaces))}",
                f"Set {name} to one of them, or unset it.",
            )
        elif wanted == ["lo"] and job.num_nodes > 1:
            yield failed(
                "network",
                f"{name}=lo, and the job runs on {job.num_nodes} machines: they cannot reach each other",
                f"Set {name} to the interface of the network.",
            )
    nccl, gloo = env.get("NCCL_SOCKET_IFNAME", "").lstrip("="), env.get("GLOO_SOCKET_IFNAME", "")
    if nccl and gloo and not nccl.startswith("^") and not any(gloo.startswith(one) for one in nccl.split(",")):
        yield warned(
            "network",
            f"NCCL_SOCKET_IFNAME={nccl} and GLOO_SOCKET_IFNAME={gloo} name different networks",
            "Name the same, unless that is meant.",
        )
    address = env.get("MASTER_ADDR", "") or job.option("master_addr", "main_process_ip") or job.option("rdzv_endpoint")
    if job.num_nodes > 1 and address and _LOCAL.match(address):
        yield failed(
            "rendezvous",
            f"the job runs on {job.num_nodes} machines and meets at {address}, which every machine takes for itself",
            "Name the first machine's address.",
        )


def _attaching(job: JobContext) -> Iterator[PreflightCheck]:
    if job.is_on("HOLTER") and job.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "").strip() == "0":
        yield failed(
            "attaching",
            "HOLTER=1 attaches when torch loads its backends, and TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns that off: the job runs unwatched",
            "Unset it, or start the script with `-m holter`.",
        )
    if job.environ.get("PYTHONDONTWRITEBYTECODE"):
        yield warned("bytecode", "PYTHONDONTWRITEBYTECODE doubles the time in which sidecars start", "Unset it.")
    if job.environ.get("HOLTER_ACTION", "").strip().lower() == "observe":
        yield warned(
            "action",
            "HOLTER_ACTION=observe: nobody is told of an incident, and nothing is stopped",
            "HOLTER_ACTION=notify tells, halt (the default) stops with a checkpoint.",
        )


def _restarts(job: JobContext) -> Iterator[PreflightCheck]:
    said = job.option("max_restarts") or job.environ.get("PET_MAX_RESTARTS", "")
    said = said or next(
        (values["max_restarts"] for _, values in job.values("accelerate") if values.get("max_restarts")), ""
    )
    is_ours = bool(job.command) and job.command[0].rpartition("/")[2] == "holter"
    if (_number(said) or 0) > 0 and not is_ours:
        yield warned(
            "restarts",
            f"the launcher restarts a job {said} times, also one that holter halted with a checkpoint",
            "Start it with `holter launch -- …`: it obeys a halt.",
        )


def _launcher(job: JobContext) -> Iterator[PreflightCheck]:
    ranks = _number(job.option("num_processes")) or 0
    if job.option("cpu") == "true" and ranks > 1 and job.option("multi_gpu") != "true":
        yield failed(
            "launcher",
            f"`accelerate launch --cpu --num_processes {ranks}` runs one process, silently",
            f"ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {ranks} …",
        )
    if job.option("nproc_per_node", "nproc-per-node") == "gpu" and job.num_devices == 0:
        yield failed("launcher", "--nproc-per-node gpu, and this machine has no GPU", "Give a number.")
    wanted = _number(job.option("nproc_per_node", "nproc-per-node", "num_gpus"))
    if wanted and job.num_devices and wanted > job.num_devices:
        yield failed(
            "launcher", f"{wanted} ranks for {job.num_devices} GPUs of this machine", f"Start {job.num_devices}."
        )


def _accelerate(job: JobContext) -> Iterator[PreflightCheck]:
    for config, values in job.values("accelerate"):

        def fail(name: str, says: str, do: str, found: Config = config) -> PreflightCheck:
            return failed("accelerate", says, do, file=found.file, line=found.lines.get(name, 0))

        ranks, machines = _number(values.get("num_processes", "")) or 1, _number(values.get("num_machines", "")) or 1
        yield from _kind(job, values, (ranks, machines), fail)
        yield from _places(values, (ranks, machines), fail)
        yield from _loading(config, values)
        yield from _stage(job, config, values, fail)


def _kind(job: JobContext, values: Mapping[str, str], size: tuple[int, int], fail: Fail) -> Iterator[PreflightCheck]:
    """Check what accelerate's `distributed_type` really starts; `size` is (number of processes, number of machines)."""
    kind, (ranks, machines) = values.get("distributed_type", "NO").upper(), size
    if kind == "MULTI_CPU" and ranks > 1 and machines == 1 and "mpirun_config.mpirun_hostfile" not in values:
        says = f"distributed_type: MULTI_CPU runs one process here, silently, not {ranks}"
        yield fail("distributed_type", says, "distributed_type: MULTI_GPU with ACCELERATE_USE_CPU=true starts them.")
    if kind == "NO" and ranks > 1:
        says = f"distributed_type: NO runs one process, not {ranks}"
        yield fail("distributed_type", says, "Name the kind: MULTI_GPU, FSDP, DEEPSPEED.")
    if kind == "DEEPSPEED" and job.is_on("ACCELERATE_USE_CPU"):
        says = "ACCELERATE_USE_CPU beside DeepSpeed gives plain DDP, silently"
        yield fail("distributed_type", says, "Unset ACCELERATE_USE_CPU; write use_cpu: true in the config.")
    if values.get("mixed_precision") == "fp16" and values.get("use_cpu", "").lower() in _TRUE:
        yield fail("mixed_precision", "mixed_precision: fp16 does not train on CPUs", "mixed_precision: bf16 or 'no'.")


def _places(values: Mapping[str, str], size: tuple[int, int], fail: Fail) -> Iterator[PreflightCheck]:
    """Check the addresses and numbers of machines and devices."""
    ranks, machines = size
    if machines > 1 and (not values.get("main_process_ip") or _LOCAL.match(values["main_process_ip"])):
        says = f"{machines} machines, and main_process_ip is {values.get('main_process_ip') or 'not set'}"
        yield fail("main_process_ip", says, "Give the first machine's address.")
    if ranks % machines:
        says = f"num_processes is {ranks}, of all machines together, and {machines} machines cannot share it evenly"
        yield fail("num_processes", says, "Make it a multiple.")
    if (_number(values.get("machine_rank", "")) or 0) >= machines:
        says = f"machine_rank {values.get('machine_rank')} of {machines} machines: they are counted from 0"
        yield fail("machine_rank", says, "Give each machine its own, from 0 on.")
    devices = [one for one in values.get("gpu_ids", "").split(",") if one.strip().isdigit()]
    if devices and len(devices) < ranks // machines:
        says = f"gpu_ids names {len(devices)} devices for {ranks // machines} processes"
        yield fail("gpu_ids", says, "Name as many, or `all`.")


def _stage(job: JobContext, config: Config, values: Mapping[str, str], fail: Fail) -> Iterator[PreflightCheck]:
    """Check ZeRO's stage against other settings, and against what the script saves."""
    name, stage = "deepspeed_config.zero_stage", values.get("deepspeed_config.zero_stage", "")
    is_deepspeed = values.get("distributed_type", "").upper() == "DEEPSPEED"
    is_init = values.get("deepspeed_config.zero3_init_flag", "").lower() in _TRUE
    if is_deepspeed and is_init and stage not in {"", "3"}:
        says = f"zero3_init_flag is on with zero_stage {stage}"
        yield fail("deepspeed_config.zero3_init_flag", says, "Turn it off, or take stage 3.")
    if stage == "3" and job.plain_save_line:
        yield _partitioned(job, {"file": config.file, "line": config.lines.get(name, 0)})


def _loading(config: Config, values: Mapping[str, str]) -> Iterator[PreflightCheck]:
    """Check that weights that are loaded only on rank 0 are passed on to the other ranks."""
    is_lean = values.get("fsdp_config.fsdp_cpu_ram_efficient_loading", "").lower() in _TRUE
    if is_lean and values.get("fsdp_config.fsdp_sync_module_states", "true").lower() not in _TRUE:
        says = "fsdp_cpu_ram_efficient_loading loads weights on rank 0 alone, and fsdp_sync_module_states is off: the other ranks hold what memory held"
        yield failed(
            "accelerate",
            says,
            "fsdp_sync_module_states: true.",
            file=config.file,
            line=config.lines.get("fsdp_config.fsdp_sync_module_states", 0),
        )


def _partitioned(job: JobContext, where: dict[str, object]) -> PreflightCheck:
    return failed(
        "zero stage", f"ZeRO stage 3 keeps a part of each weight on a rank, and line {job.plain_save_line} of the script saves a module's own state dict: it is empty or a part",
        "Save by `engine.save_checkpoint` or `accelerator.get_state_dict(model)`.", file=str(where["file"]), line=int(str(where["line"])),
    )  # fmt: skip


def _deepspeed(job: JobContext) -> Iterator[PreflightCheck]:
    for config, values in job.values("deepspeed"):

        def fail(says: str, do: str, found: Config = config) -> PreflightCheck:
            return failed("deepspeed", says, do, file=found.file)

        fp16, bf16 = (values.get(f"{name}.enabled", "").lower() in _TRUE for name in ("fp16", "bf16"))
        chosen = next(
            (other["mixed_precision"] for _, other in job.values("accelerate") if other.get("mixed_precision")), ""
        )
        if (chosen == "bf16" and fp16) or (chosen == "fp16" and bf16):
            yield fail(
                f"accelerate's config says mixed_precision: {chosen}, and this one enables the other",
                "Say the same in both.",
            )
        if fp16 and bf16:
            yield fail("fp16 and bf16 are both enabled", "Enable one.")
        batch, micro, steps = (
            _number(values.get(name, ""))
            for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        ranks = job.local_ranks * job.num_nodes
        if batch and micro and ranks > 1 and batch != micro * (steps or 1) * ranks:
            yield fail(
                f"train_batch_size {batch} is not {micro} a rank times {steps or 1} steps times {ranks} ranks",
                f"Write {micro * (steps or 1) * ranks}, or leave one of the three out.",
            )
        if values.get("elasticity.enabled", "").lower() in _TRUE and batch:
            yield fail(
                "elasticity is enabled, which computes train_batch_size, and train_batch_size is given", "Remove one."
            )
        stage = values.get("zero_optimization.stage", "")
        gathers = values.get("zero_optimization.stage3_gather_16bit_weights_on_model_save", "").lower()
        if stage == "3" and gathers not in _TRUE:
            yield warned(
                "deepspeed",
                "stage 3 without stage3_gather_16bit_weights_on_model_save: save_16bit_model writes nothing",
                "Turn it on, or save checkpoints and convert them.",
                file=config.file,
            )
        if stage == "3" and job.plain_save_line:
            yield _partitioned(job, {"file": config.file, "line": 0})
        offload = values.get("zero_optimization.offload_param.device", "none")
        if offload not in {"none", ""} and stage not in {"3", ""}:
            yield fail(
                f"offload_param takes effect at stage 3 only, and the stage is {stage}", "Take stage 3, or remove it."
            )


def _number(text: str) -> int | None:
    try:
        return int(str(text).strip())
    except ValueError:
        return None
