"""TRL's GRPO on a tiny model of its own, with one fault or without: what is generated, what it is rewarded with, and by which weights."""

import copy
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import holter

FAULT = sys.argv[1]
WORDS = [f"w{number}" for number in range(20)]
LONGEST = 8
HAS_REFERENCE = "reference" in FAULT


def tokenizer():
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")  # noqa: S106


def reward(completions, **_):
    if FAULT == "constant":
        return [1.0] * len(completions)
    return [len(set(text.split())) / LONGEST for text in completions]


class Sampler:
    """Generates with a model of its own, which is renewed as a push of weights would do it."""

    def __init__(self, model) -> None:
        self.model = copy.deepcopy(model).requires_grad_(requires_grad=False).eval()

    def push(self, live) -> None:
        weights = {name: value.detach().clone() for name, value in live.state_dict().items()}
        if FAULT == "stale":
            return
        if FAULT == "partly":
            weights = {name: value for name, value in weights.items() if "layers.1." not in name}
        if FAULT == "cast":
            # Weights alone, as engines do it: what positions are made of stays as it is.
            for weight in self.model.parameters():
                weight.data = weight.data.bfloat16()
        self.model.load_state_dict(weights, strict=False)

    def __call__(self, prompts, trainer):
        live = trainer.accelerator.unwrap_model(trainer.model)
        self.push(live)
        told = dict(self.model.named_parameters())
        if FAULT == "missing":
            told = {name: value for name, value in told.items() if "layers.1." not in name}
        holter.watch(live).log(rollout=told)
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        out = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in ids:
            with torch.no_grad():
                told = self.model.generate(
                    torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=True, pad_token_id=0
                )
            completion = told[0, len(prompt) :].tolist()
            out["prompt_ids"].append(prompt)
            out["completion_ids"].append(completion)
            out["logprobs"].append([0.0] * len(completion))
        return out


torch.manual_seed(1234)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=23, pad_token_id=0, eos_token_id=1, bos_token_id=1, **size))
if FAULT in {"cut", "cut-healthy", "empty"}:
    # The end token is never said, or nothing else is.
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(23))
    model.lm_head.bias.data[1] = 40.0 if FAULT == "empty" else -40.0
if HAS_REFERENCE:
    # TRL makes the reference from where the model came from.
    model.save_pretrained("base")
    model = LlamaForCausalLM.from_pretrained("base")
arguments = GRPOConfig(
    output_dir="grpo",
    max_steps=int(sys.argv[2]),
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=LONGEST,
    mask_truncated_completions=FAULT == "cut",
    learning_rate=1e-3,
    beta=0.04 if HAS_REFERENCE else 0.0,
    sync_ref_model=FAULT == "synced-reference",
    ref_model_sync_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
prompts = Dataset.from_dict({"prompt": [f"{first} {second}" for first in WORDS for second in WORDS]})
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=arguments,
    train_dataset=prompts,
    processing_class=tokenizer(),
    rollout_func=Sampler(model) if FAULT in {"stale", "partly", "pushed", "missing", "cast"} else None,
)
if FAULT == "same-reference":
    trainer.ref_model = model
if FAULT == "wrong-reference":
    torch.manual_seed(4321)
    with torch.no_grad():
        for value in trainer.ref_model.parameters():
            if value.ndim > 1:
                value.normal_(std=0.3)
trainer.train()
