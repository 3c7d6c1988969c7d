"""TRL's GRPO with a LoRA of Peft on a tiny model that is made here, so that nothing is fetched; it knows nothing of holter.

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no \
        --dynamo_backend no --main_process_port 0 -m holter deploy/examples/train_grpo.py

The reward likes completions with many different tokens.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

WORDS = [f"w{number}" for number in range(60)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word a token."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")  # noqa: S106


def variety(completions: list[str], **_: object) -> list[float]:
    """The share of words that are not said twice."""
    return [len(set(text.split())) / max(len(text.split()), 1) for text in completions]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(1234)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=63, pad_token_id=0, eos_token_id=1, bos_token_id=1, **size))
    arguments = GRPOConfig(
        output_dir="grpo",
        max_steps=options.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        beta=0.04,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": [f"{first} {second}" for first in WORDS[:12] for second in WORDS[:12]]})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=variety,
        args=arguments,
        train_dataset=prompts,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
