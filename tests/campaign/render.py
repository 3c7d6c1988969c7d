"""A case as one plain script. Lines of the fault stand between marks; the healthy twin is the same text without them."""

import re

from tests.campaign.grammar import RATES, Case

BEGIN, END = "# FAULT: {}", "# (end of the fault)"
MARK = "  # FAULT: {}"
OWN_OPTIMIZER = '''
class SignDescent(torch.optim.Optimizer):
    """Steps by the sign of a running mean."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    p.add_(mean.sign(), alpha=-group["lr"])
'''
EFFECT = '''
def effect(is_there, what):
    """Checks the fault without any tool: a fault without effect counts for nothing."""
    print(f"effect {'is there' if is_there else 'is MISSING'}: {what}", flush=True)
'''
COMPARE = """
def same_on_all_ranks(tensor):
    parts = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(parts, tensor.detach().contiguous())
    return all(torch.equal(parts[0], part) for part in parts)
"""
TYPICAL = '''
def typical(values):
    """The median."""
    return sorted(values)[len(values) // 2]
'''
LOG_BY_HAND = '''
watch = None
if os.environ.get("HOLTER") == "1":
    import holter

    watch = holter.watch(model, optimizer)


def log(values):
    """What only this script knows."""
    if watch is not None:
        watch.log(**values)
'''
LOG_BY_ACCELERATE = '''
def log(values):
    """Numbers, as trackers take them."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, dict):
            numbers |= {f"{name}/{term}": float(part) for term, part in value.items()}
        elif name.endswith("codebook_usage"):
            numbers[name] = float((value > 0).float().mean())
        elif torch.is_tensor(value) and value.dim():
            numbers |= {f"{name}_mean": float(value.mean()), f"{name}_std": float(value.std(dim=1).mean())}
        else:
            numbers[name] = float(value)
    accelerator.log(numbers, step=step)
'''
SCHEDULES = {
    "none": "lambda step: 1.0",
    "warmup": "lambda step: min(1.0, (step + 1) / 10)",
    "cosine": "lambda step: 0.55 + 0.45 * math.cos(math.pi * step / STEPS)",
}


def render(case: Case) -> str:
    """The script."""
    return _Script(case).text()


def _indented(text: str, depth: int) -> str:
    return "".join(f"{'    ' * depth}{line}\n" if line.strip() else "\n" for line in text.splitlines())


class _Script:
    """Puts the parts of one case together."""

    def __init__(self, case: Case) -> None:
        self.case, self.how = case, case.setting
        self.odd = [injected for _, injected in case.oddities]
        self.fault = case.injected

    def part(self, name: str, sound: str) -> str:
        """What stands at a part that can be replaced; with a mark, if it is the fault's."""
        for injected in (*self.odd, *([self.fault] if self.fault else [])):
            sound = injected.base_replaced.get(name, sound)
            if name in injected.replaced:
                return injected.replaced[name]
        return sound

    def mark(self, name: str) -> str:
        """At the end of a line whose part was replaced by the fault."""
        return MARK.format(self.fault.words) if self.fault and name in self.fault.replaced else ""

    def point(self, name: str, depth: int = 0) -> str:
        """What stands at a point."""
        lines: list[str] = []
        for injected in self.odd:
            lines += injected.base_points.get(name, []) + injected.points.get(name, [])
        base = self.fault.base_points.get(name, []) if self.fault else []
        own = self.fault.points.get(name, []) if self.fault else []
        marked = [BEGIN.format(self.fault.words), *own, END] if self.fault and own else []
        # What is left out or changed after a step comes before the script's own calls there.
        lines += [*marked, *base] if name == "stepped" else [*base, *marked]
        return _indented("\n".join(lines), depth) if lines else ""

    def text(self) -> str:
        """All of it."""
        body = "\n".join(part.strip("\n") + "\n" for part in self._parts() if part.strip())
        body = re.sub(r"\n{4,}", "\n\n\n", body)
        return f'"""{self._docstring()}"""\n\n{self._imports(body)}\n{body}'

    def _docstring(self) -> str:
        env = "".join(f"{name}='{value}' " for name, value in self.env.items())
        return (
            f"Case {self.case.seed}: {self.case.title}.\n\n"
            f"    {env}torchrun --nproc_per_node {self.how.ranks} case.py\n"
            f"    {env}torchrun --nproc_per_node {self.how.ranks} -m holter case.py\n"
        )

    @property
    def env(self) -> dict[str, str]:
        """What the job's environment has, the twin's too."""
        return self.fault.env if self.fault else {}

    def _imports(self, body: str) -> str:
        plain = [name for name in ("contextlib", "copy", "io", "math", "os", "tempfile", "time") if f"{name}." in body]
        lines = [f"import {name}" for name in plain]
        lines += ["", "import torch", "import torch.distributed as dist"] if "dist." in body else ["", "import torch"]
        if self.how.loop == "accelerate":
            names = ", ".join(name for name in ("Accelerator", "DistributedDataParallelKwargs") if name in body)
            lines.append(f"from accelerate import {names}")
        lines.append("from torch import nn")
        functions = [name for name in ("cross_entropy", "mse_loss") if name in body]
        if functions:
            lines.append(f"from torch.nn.functional import {', '.join(functions)}")
        if "DistributedDataParallel(" in body:
            lines.append("from torch.nn.parallel import DistributedDataParallel")
        if "DataLoader(" in body or "TensorDataset(" in body:
            lines.append(
                f"from torch.utils.data import {', '.join(n for n in ('DataLoader', 'TensorDataset') if n in body)}"
            )
        if "DistributedSampler(" in body:
            lines.append("from torch.utils.data.distributed import DistributedSampler")
        if self.how.loop == "trainer":
            lines.append("from transformers import Trainer, TrainerCallback, TrainingArguments")
        if "holter.testing" in body:
            lines += ["", "import holter.testing"]
        return "\n".join(lines).strip("\n") + "\n"

    def _parts(self) -> list[str]:
        held_out = self.part("held_out", "")
        constants = f"STEPS = {self.case.steps}\n" + (
            f"HELD_OUT = {held_out}{self.mark('held_out')}\n" if held_out else ""
        )
        own = (
            [*self.fault.effect, *(line for lines in self.fault.points.values() for line in lines)]
            if self.fault
            else []
        )
        return [
            constants,
            self._start(),
            EFFECT if any("effect(" in line for line in own) else "",
            COMPARE if any("same_on_all_ranks(" in line for line in own) else "",
            TYPICAL if any("typical(" in line for line in own) else "",
            self.how.model.source,
            self.how.model.data,
            self._data(),
            OWN_OPTIMIZER if self.how.optimizer == "own" else "",
            self._model(),
            self._loop(),
            self._end(),
        ]

    def _start(self) -> str:
        seed = "torch.manual_seed(7)\n"
        if self.how.loop == "plain":
            return f'dist.init_process_group("gloo")\nrank, world = dist.get_rank(), dist.get_world_size()\n{seed}'
        if self.how.loop == "accelerate":
            words = ["cpu=True"]
            if self.how.precision != "fp32":
                words.append(f'mixed_precision="{self.how.precision}"')
            if self.how.accumulate > 1:
                words.append(f"gradient_accumulation_steps={self.how.accumulate}")
            ddp = self.part("ddp", "")
            if ddp:
                words.append(f"kwargs_handlers=[DistributedDataParallelKwargs({ddp})]")
            return f"accelerator = Accelerator({', '.join(words)}){self.mark('ddp')}\nrank, world = accelerator.process_index, accelerator.num_processes\n{seed}"
        return f'rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])\n{seed}'

    def _data(self) -> str:
        if self.how.loop == "trainer":
            return (
                "\nclass Samples(torch.utils.data.Dataset):\n"
                '    """For the Trainer, which shards and shuffles by itself."""\n\n'
                "    def __init__(self):\n"
                "        parts = [sample(5000 + number) for number in range(48)]\n"
                "        self.x, self.y = (torch.cat(tensors) for tensors in zip(*parts))\n\n"
                "    def __len__(self):\n        return len(self.x)\n\n"
                '    def __getitem__(self, index):\n        return {"x": self.x[index], "y": self.y[index]}\n'
            )
        if self.how.data == "made":
            number = self.part("number", "1000 * number + rank")
            return f'\ndef batch(number):\n    """This rank\'s batch."""\n    return sample({number}){self.mark("number")}\n'
        sampler = self.part("sampler", "DistributedSampler(data)")
        set_epoch = "pass" if sampler == "None" else self.part("set_epoch", "sampler.set_epoch(epoch)")
        keywords = self.part("loader", "")
        return (
            "data = TensorDataset(*(torch.cat(parts) for parts in zip(*(sample(5000 + number) for number in range(24 * world)))))\n"
            + self.point("dataset")
            + f"sampler = {sampler}{self.mark('sampler')}\n"
            f"loader = DataLoader(data, batch_size=len(sample(0)[0]), sampler=sampler{keywords})\n"
            + self.point("loader")
            + '\n\ndef batches():\n    """Epoch after epoch."""\n    epoch = 0\n    while True:\n'
            f"        {set_epoch}{self.mark('set_epoch')}\n        yield from loader\n        epoch += 1\n\n\nstream = batches()\n"
        )

    def _optimizers(self) -> str:
        parameters = self.part("parameters", "[p for p in net.parameters() if p.requires_grad]")
        rate, mark = self.part("rate", RATES[self.how.optimizer]), self.mark("parameters") + self.mark("rate")
        if self.how.optimizer == "two":
            return (
                f"matrices = [p for p in net.parameters() if p.requires_grad and p.dim() > 1]\n"
                f"vectors = [p for p in net.parameters() if p.requires_grad and p.dim() <= 1]\n"
                f"optimizer, second = torch.optim.SGD(matrices, lr={rate}, momentum=0.9), torch.optim.AdamW(vectors, lr=1e-3)\n"
            )
        made = {
            "sgd": "torch.optim.SGD({}, lr={}, momentum=0.9)",
            "adamw": "torch.optim.AdamW({}, lr={})",
            "own": "SignDescent({}, lr={})",
        }
        return f"optimizer = {made[self.how.optimizer].format(parameters, rate)}{mark}\n"

    @property
    def _has_schedule(self) -> bool:
        return self.how.schedule != "none" or self.how.loop == "trainer" or self.part("schedule", "") != ""

    def _model(self) -> str:
        setup = self.how.model.setup.strip("\n")
        text = "net = Net()\n" + self.point("model") + (f"{setup}\n" if setup else "")
        if self.how.loop == "plain":
            ddp = self.part("ddp", "")
            text += f"model = DistributedDataParallel(net{', ' if ddp else ''}{ddp}){self.mark('ddp')}\n" + self.point(
                "ddp"
            )
        text += self._optimizers()
        if self.how.loop == "accelerate":
            both = ", prepared_second" if self.how.optimizer == "two" else ""
            text += (
                f"model, prepared{both} = accelerator.prepare(net, optimizer{', second' if both else ''})\n"
                + self.point("ddp")
            )
        if self._has_schedule:
            curve = self.part("schedule", SCHEDULES[self.how.schedule])
            text += f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, {curve}){self.mark('schedule')}\n"
        if self.how.precision == "fp16":
            text += f'scaler = torch.amp.GradScaler("cpu"{", " if self.part("scaler", "") else ""}{self.part("scaler", "")}){self.mark("scaler")}\n'
        if self.how.ema:
            text += "average = copy.deepcopy(net).requires_grad_(False)\n"
        text += "losses = []\n"
        if self.how.loop == "plain" and self._logs:
            text += LOG_BY_HAND
        if self.how.loop == "accelerate" and self._logs:
            text += "\n" + LOG_BY_ACCELERATE
        if self.how.loop == "plain" and self.how.precision != "fp32":
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[self.how.precision]
            text += f'\n\ndef called(model, x):\n    with torch.autocast("cpu", torch.{dtype}):\n        return model(x)\n\n\n'
        return text + self.point("made") + ("" if self.how.loop == "trainer" else self.point("wrapped"))

    @property
    def _logs(self) -> bool:
        own = [*self.odd, *([self.fault] if self.fault else [])]
        lines = [
            line for one in own for points in (one.points, one.base_points) for part in points.values() for line in part
        ]
        is_average = self.how.ema and self.how.loop == "plain"
        return "logs" in self.how.model.has or is_average or any("log({" in line for line in lines)

    def _loss(self, model: str, depth: int) -> str:
        """The model's own lines of the loss, with the points in them."""
        is_cast = self.how.loop == "plain" and self.how.precision != "fp32"
        call = f"called({model}, x)" if is_cast else f"{model}(x)"
        names = {f"name_{name}": under for name, under in self.case.names.items()}
        text = ""
        for line in self.how.model.loss.strip("\n").splitlines():
            if line.startswith("@"):
                text += self.point(line[1:], depth)
            else:
                mark = self.mark("model") if "{call}" in line else ""
                text += _indented(line.format(call=call, **names) + mark, depth)
        return text

    def _zero(self, depth: int) -> str:
        both = "\nsecond.zero_grad()" if self.how.optimizer == "two" else ""
        sound = f"optimizer.zero_grad(){both}"
        part = self.part("zero_grad", sound)
        marks = self.mark("zero_grad").strip()
        text = part.replace("ZERO_GRAD", sound.replace("\n", "\n    "))
        return _indented((f"{marks}\n" if marks else "") + text, depth) + self.point("cleared", depth)

    def _loop(self) -> str:
        if self.how.loop == "trainer":
            return self._trainer()
        parts = self.part("parts", str(self.how.accumulate))
        is_many = parts != "1"
        inner = 2 if is_many else 1
        number = "step * parts + micro" if is_many else "step"
        text = "for step in range(STEPS):\n" + self.point("step", 1)
        if self.how.loop == "plain":
            text += self._zero(1)
        if is_many:
            text += _indented(f"parts = {parts}\nfor micro in range(parts):", 1)
        if self.how.loop == "accelerate" and is_many:
            text += _indented("with accelerator.accumulate(model):", 2)
            inner = 3
        fetch = f"batch({number})" if self.how.data == "made" else "next(stream)"
        text += _indented(f"x, y = {fetch}", inner)
        if self.how.loop == "plain" and is_many:
            text += _indented("model.require_backward_grad_sync = micro == parts - 1", inner)
        text += self.point("batch", inner)
        text += self._loss(self.part("model", "model"), inner)
        text += self.point("loss", inner)
        text += _indented("losses.append(float(loss.detach()))", inner)
        text += self._steps(inner, is_many=is_many)
        return text

    def _steps(self, inner: int, *, is_many: bool) -> str:
        two = self.how.optimizer == "two"
        if self.how.loop == "accelerate":
            text = _indented("accelerator.backward(loss)", inner)
            points = (
                self.point("reduced"),
                ("accelerator.clip_grad_norm_(net.parameters(), 1.0)\n" if self.how.clip else ""),
                self.point("clipped"),
            )
            if is_many and any(points):
                text += _indented("if accelerator.sync_gradients:", inner)
            text += _indented("".join(points), inner + (1 if is_many else 0))
            text += _indented("prepared.step()" + ("\nprepared_second.step()" if two else ""), inner)
            text += _indented("prepared.zero_grad()" + ("\nprepared_second.zero_grad()" if two else ""), inner)
        else:
            division = self.part("divide", " / parts") if is_many else ""
            whole = f"(loss{division})" if division else "loss"
            scaled = f"scaler.scale({whole.strip('()')})" if self.how.precision == "fp16" else whole
            text = _indented(f"{scaled}.backward(){self.mark('divide')}", inner)
            if self.how.precision == "fp16":
                text += _indented("scaler.unscale_(optimizer)", 1)
            text += self.point("reduced", 1)
            if self.how.clip:
                text += _indented("torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)", 1)
            text += self.point("clipped", 1)
            if self.how.precision == "fp16":
                text += _indented("scaler.step(optimizer)\nscaler.update()", 1)
            else:
                text += _indented(
                    "optimizer.step()"
                    + (f"\n{self.part('second', 'second.step()')}{self.mark('second')}" if two else ""),
                    1,
                )
        text += self.point("stepped", 1)
        metric = self.part("metric", "")
        text += _indented(metric + self.mark("metric"), 1) if metric else ""
        if self._has_schedule:
            text += _indented("scheduler.step()", 1)
        if self.how.ema:
            update = self.part("ema", "kept.lerp_(live, 0.05)")
            text += _indented(
                "with torch.no_grad():\n    for kept, live in zip(average.parameters(), net.parameters()):\n        "
                f"{update}{self.mark('ema')}" + ('\nlog({"ema": average})' if self.how.loop == "plain" else ""),
                1,
            )
        return text

    def _trainer(self) -> str:
        text = '\nclass Hooks(TrainerCallback):\n    """Where the Trainer calls the script."""\n'
        for name, point, step in (
            ("on_train_begin", "wrapped", ""),
            ("on_step_begin", "step", "step = state.global_step"),
            ("on_pre_optimizer_step", "reduced clipped", "step = state.global_step"),
            ("on_optimizer_step", "stepped", "step = state.global_step"),
        ):
            body = "".join(self.point(one, 2) for one in point.split())
            if body:
                kept = sorted(set(re.findall(r"^ *(\w+) = ", body, flags=re.MULTILINE)))
                shared = f"        global {', '.join(kept)}\n" if kept else ""
                text += f"\n    def {name}(self, args, state, control, **kwargs):\n{shared}" + (f"        {step}\n" if step else "") + body  # fmt: skip
        text += '\n\nclass Loop(Trainer):\n    """With a loss of its own."""\n\n'
        text += "    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):\n"
        text += '        step, x, y = self.state.global_step, inputs["x"], inputs["y"]\n'
        text += self.point("batch", 2) + self._loss(self.part("model", "model"), 2) + self.point("loss", 2)
        text += (
            "        losses.append(float(loss.detach()))\n        return (loss, logits) if return_outputs else loss\n"
        )
        ddp = self.part("ddp", "")
        words = [
            "output_dir=tempfile.mkdtemp()", "max_steps=STEPS", "per_device_train_batch_size=8", "logging_steps=5",
            'save_strategy="no"', "report_to=[]", "use_cpu=True", "disable_tqdm=True", "remove_unused_columns=False",
            f"gradient_accumulation_steps={self.how.accumulate}", f"max_grad_norm={1.0 if self.how.clip else 0.0}",
            f"bf16={self.how.precision == 'bf16'}",
            *(f"ddp_{word.strip()}" for word in ddp.split(",") if word),
        ]  # fmt: skip
        settings = "".join(f"    {word},\n" for word in words)
        has_hooks = "def on_" in text
        if not has_hooks:
            text = text[text.index("\n\nclass Loop") :]
        hooks = ", callbacks=[Hooks()]" if has_hooks else ""
        return (
            text + f"\n\nsettings = TrainingArguments(\n{settings}){self.mark('ddp')}\n"
            f"Loop(model=net, args=settings, train_dataset=Samples(), optimizers=(optimizer, scheduler){hooks}).train()\n"
        )

    def _end(self) -> str:
        text = ""
        if self.fault and self.fault.effect:
            text += "# CHECK: is the fault's effect there?\n" + "\n".join(self.fault.effect) + "\n"
        text += 'print("the end", flush=True)\n'
        if self.how.loop == "plain":
            # While the wrapper lives, gloo's destructor hangs now and then.
            text += "dist.barrier()\ndel model\ndist.destroy_process_group()\n"
        if self.how.loop == "accelerate":
            text += "accelerator.end_training()\n"
        return text
