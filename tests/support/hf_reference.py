"""Hugging Face's model in one process, fully in fp64: the reference for all pipelines."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

import debubble as db
from debubble.runtime.models.lora import plain_name
from tests.support.runtime_cases import assert_gradients, loss_alone, plan_of, rows_of, run_threads, tokens_of


class _Wide(TorchFunctionMode):
    """Keeps fp64 where transformers computes norms and softmaxes in fp32 for any dtype."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64
        if wide and (function is torch.Tensor.float or (function is torch.Tensor.to and args[1:] == (torch.float32,))):
            return args[0]
        if wide and kwargs.get("dtype") is torch.float32 and function is torch.nn.functional.softmax:
            kwargs["dtype"] = torch.float64
        if function is torch.zeros and len(args) == 1 and isinstance(args[0], int):  # where it sums its auxiliary loss
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def hf_model(config: Any, *, seed: int = 1) -> Any:
    """A model with random weights, including biases and norms, so that each affects the loss."""
    torch.manual_seed(seed)
    hf_config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager", experts_implementation="eager"
    ).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def peft_model(config: Any, **entries: Any) -> Any:
    """A peft model with nonzero adapters."""
    import peft

    settings = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **entries}
    model = peft.get_peft_model(hf_model(config), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).double()
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    return model


@contextmanager
def exactly() -> Iterator[Any]:
    """A context in which Hugging Face's model computes in fp64."""
    with _Wide():
        yield


def loss_of(model: Any, tokens: Any, *, micro_batches: Any) -> Any:
    """Mean loss over all tokens, its gradients left on the model's parameters, micro-batch by micro-batch."""
    total = torch.zeros((), dtype=torch.float64)
    with exactly():
        for rows in tokens.chunk(micro_batches):
            answer = model(rows[:, :-1])
            loss = (
                torch.nn.functional.cross_entropy(answer.logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
                / tokens[:, 1:].numel()
            )
            if getattr(answer, "aux_loss", None) is not None:
                loss = loss + model.config.router_aux_loss_coef * answer.aux_loss / micro_batches
            loss.backward()
            total += loss.detach()
    return total


def assert_trains_as_alone(
    model: Any,
    plan: Any,
    tokens: Any,
    *,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
    rounding: float = 0.0,
    only: bool = False,
) -> None:
    """Compare loss, gradients and norm of a plan's step in place with those of the model alone.

    `rounding`: absolute tolerance for gradients that are zero.  `only`: no other parameter may have a gradient.
    """
    micro_batches = plan.micro_batches * plan.options.data
    expected_loss = loss_of(model, tokens, micro_batches=micro_batches)
    expected = {plain_name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    model.zero_grad()

    def one(pipeline: Any) -> Any:
        with within():
            loss = pipeline.step(rows_of(pipeline, tokens))
        reached = {name for name, p in pipeline.named_parameters() if p.grad is not None}
        actual_norm = pipeline.clip_grad_norm(float("inf"))
        with torch.no_grad():
            for parameter in pipeline.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)
        return loss, actual_norm, reached, pipeline.state_dict()  # which joins sharded gradients

    answers = run_threads(plan, one, model=model)
    for loss, actual_norm, _, _ in answers:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(actual_norm, norm, rtol=1e-12, atol=0)
    have = {name for _, _, reached, _ in answers for name in reached}
    assert expected.keys() == have if only else expected.keys() <= have
    for *_, state in answers:
        assert_gradients({name: state[name] for name in expected.keys() & state.keys()}, expected, absolute=rounding)


def assert_checkpoint_returns(config: Any, folder: Path, *, shard_size: str = "1GB", **options: Any) -> None:
    """Load transformers' checkpoint of a model into a pipeline, check its loss, and save it unchanged."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(folder / "in", max_shard_size=shard_size)
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), model.config.to_dict(), dtype="fp32", **options)
    tokens = tokens_of(config, rows=2)

    def through(pipeline: Any) -> Any:
        pipeline.load_pretrained(folder / "in")
        pipeline.save_pretrained(folder / "out")
        return pipeline.step(tokens)

    losses = run_threads(plan, through)
    torch.testing.assert_close(losses[0], loss_alone(model, tokens), rtol=1e-5, atol=0)
    back = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(back[name], tensor), name
