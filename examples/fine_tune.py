"""Fine-tune a causal language model of Hugging Face on a text file, with several workers.

    python examples/fine_tune.py MODEL TEXT [--lora] [--steps 100] [--output fine_tuned]

MODEL is a folder, or a name on the hub. Under torchrun each process is a worker; otherwise there are two.
With --lora (pip install peft) workers train and send the adapters alone: of a model of 1B parameters about 1%.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import adloco


def sequences(tokenizer, path: str, length: int) -> torch.Tensor:
    """Return the tokens of a text file as [n, length]."""
    ids = tokenizer(Path(path).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    if len(ids) < length:
        raise ValueError(f"{path} has {len(ids)} tokens, fewer than --length {length}")
    return ids[: len(ids) // length * length].reshape(-1, length)


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))


def own_device() -> torch.device:
    """Return the GPU of this process, which others may share, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def losses(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each sequence's next tokens, [n]."""
    logits = model(input_ids=ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def train(options: argparse.Namespace) -> dict:
    """Train, save, and return what was measured."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if options.lora:
        model = with_adapters(model)
    device = own_device()
    model.to(device)
    ids = sequences(tokenizer, options.text, options.length).to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.rate)
    batch = adloco.AdaptiveBatch("norm_test", initial=8, max_micro_batch=8, largest=64)
    worker = adloco.Worker(model, optimizer, method="DiLoCo", inner_steps=10, batch=batch, gradient_clipping=1.0)

    with torch.no_grad():
        before = losses(model, ids[:32]).mean().item()
    while worker.steps < options.steps or worker.steps % 10:  # whole rounds: within one, workers differ
        for indices in worker.micro_batches(len(ids)):
            worker.backward(losses(model, ids[indices]))
        worker.step()
    with torch.no_grad():
        after = losses(model, ids[:32]).mean().item()

    if worker.index == 0:
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
        print(
            f"loss {before:.3f} -> {after:.3f} after {worker.communications} communications "
            f"({worker.bytes_communicated / 1e6:.2f} MB); saved in {options.output}"
        )
    elements = sum(parameter.numel() for parameter in trained)
    return {"before": before, "after": after, "bytes": worker.bytes_communicated, "elements": elements}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model with several workers.")
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("text", help="a text file")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--steps", type=int, default=100, help="inner steps; default: %(default)s")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence; default: %(default)s")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate; default: %(default)s")
    parser.add_argument("--output", default="fine_tuned", help="folder of the result; default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        train(parse())
    else:
        adloco.launch(train, parse(), processes=2)
