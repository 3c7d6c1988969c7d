"""The list of all frameworks that holter knows, in the order in which they are asked: outermost first, any other loop last."""

from holter.frameworks.accelerate.framework import Accelerate
from holter.frameworks.deepspeed.framework import DeepSpeed
from holter.frameworks.fsdp.framework import Fsdp
from holter.frameworks.hf_trainer.framework import HfTrainer
from holter.frameworks.loop.framework import Loop
from holter.rank.framework import Framework

ALL: tuple[Framework, ...] = (HfTrainer(), DeepSpeed(), Accelerate(), Fsdp(), Loop())
