"""Whose bytes a block holds: by the recorder, by its stack, by its size, or nobody's."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from src.architecture import describe
from src.config import compose_keywords, to_request
from src.measure.attribution import FRAMES, Evidence, attribute
from src.measure.events import Owner
from src.measure.recorded import Held
from src.spec import Layout, Method, Step
from src.units import MIB

TOKENS = 4 * 512


def step(method: Method = Method.SINGLE, num_gpus: int = 1, **keys: object) -> Step:
    asked = {"model": "opt-125m", "gpu": "a100-80gb", "seq_len": 512, "finetune": "full"}
    request = to_request(compose_keywords({**asked, **keys})).request
    shard = num_gpus if method.is_fsdp else 1
    return Step(
        job=request.job,
        method=method,
        layout=Layout(dp=num_gpus, shard=shard),
        gpu=request.cluster.gpu,
        micro_batch=4,
    )


def sizes(of: Step, *, parts: int = 1, width: int = 4) -> list[int]:
    """The bytes of every parameter, in blocks."""
    found = []
    for parameter in describe(of.job.model).named_parameters():
        rows = -(-parameter.shape[0] // parts)
        num_bytes = rows * parameter.numel // parameter.shape[0] * width
        found.append(-(-num_bytes // 512) * 512)
    return found


def held(num_bytes: int, *frames: str, early: bool = False, category: str = "") -> Held:
    return Held(num_bytes=num_bytes, frames=frames, is_early=early, category=category)


def test_a_recorder_that_names_owners_is_believed() -> None:
    blocks = [held(MIB, category=owner) for owner in Owner]
    found = attribute(blocks, step())
    assert found.num_bytes == dict.fromkeys(Owner, MIB)
    assert found.by_evidence == {Evidence.RECORDER: len(Owner) * MIB}


@pytest.mark.parametrize(
    ("frame", "owner"),
    [
        ("/x/torch/optim/adam.py:_init_group", Owner.OPTIMIZER_STATES),
        ("/x/torch/optim/adam.py:_multi_tensor_adam", Owner.TEMPORARIES),
        ("/x/torch/nn/utils/clip_grad.py:_get_total_norm", Owner.TEMPORARIES),
        ("/x/bitsandbytes/optim/optimizer.py:init_state", Owner.OPTIMIZER_STATES),
        ("/x/_fully_shard/_fsdp_collectives.py:foreach_all_gather", Owner.GATHERED_WEIGHTS),
        ("/x/_fully_shard/_fsdp_param.py:init_all_gather_outputs", Owner.GATHERED_WEIGHTS),
        ("/x/_fully_shard/_fsdp_collectives.py:foreach_reduce", Owner.COMMUNICATION_BUFFERS),
        ("/x/torch/nn/parallel/distributed.py:_ddp_init_helper", Owner.COMMUNICATION_BUFFERS),
        ("/x/transformers/loss/loss_utils.py:fixed_cross_entropy", Owner.LOGITS),
        ("/x/torch/nn/modules/module.py:_apply", Owner.WEIGHTS),
        ("/x/models/opt/modeling_opt.py:forward", Owner.SAVED_ACTIVATIONS),
        ("??:at::cuda::getCurrentCUDABlasHandle", Owner.WORKSPACE),
        ("/b/CublasHandlePool.cpp:at::cuda::getCUDABlasLtWorkspace", Owner.WORKSPACE),
    ],
)
def test_the_innermost_known_frame_decides(frame: str, owner: Owner) -> None:
    stack = ("/x/train.py:helper", frame, "/x/models/opt/modeling_opt.py:forward")
    found = attribute([held(7 * MIB, *stack)], step())
    assert found.num_bytes == {owner: 7 * MIB}
    assert found.by_evidence == {Evidence.FRAMES: 7 * MIB}


def test_frames_are_those_of_the_installed_libraries() -> None:
    """Every literal function name stands in a file that the pattern's path names."""
    roots = {}
    for name in ("torch", "transformers"):
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        roots[name] = Path(spec.origin).parent
    text = {
        ("_init_group",): roots["torch"] / "optim" / "adam.py",
        ("alloc_all_gather_outputs", "init_all_gather_outputs"): roots["torch"]
        / "distributed/fsdp/_fully_shard/_fsdp_param.py",
        ("foreach_all_gather", "foreach_reduce"): roots["torch"]
        / "distributed/fsdp/_fully_shard/_fsdp_collectives.py",
        ("_ddp_init_helper",): roots["torch"] / "nn/parallel/distributed.py",
        ("cross_entropy",): roots["torch"] / "nn/functional.py",
        ("_apply", "to_empty"): roots["torch"] / "nn/modules/module.py",
        ("recompute_fn", "unpack_hook"): roots["torch"] / "utils/checkpoint.py",
        ("_engine_run_backward",): roots["torch"] / "autograd/graph.py",
        ("from_pretrained",): roots["transformers"] / "modeling_utils.py",
    }
    for names, file in text.items():
        source = file.read_text("utf-8")
        for name in names:
            assert re.search(rf"def {name}\b", source), name
            frame = f"{file}:{name}"
            assert any(re.search(pattern, frame) for pattern, _ in FRAMES), frame
    assert (roots["transformers"] / "loss" / "loss_utils.py").is_file()
    assert (roots["transformers"] / "core_model_loading.py").is_file()


def test_logits_are_told_from_other_activations_by_their_size() -> None:
    logits = TOKENS * 50272 * 4
    forward = "/x/torch/nn/modules/linear.py:forward"
    found = attribute([held(logits, forward), held(3 * MIB, forward)], step())
    assert found.num_bytes == {Owner.LOGITS: logits, Owner.SAVED_ACTIVATIONS: 3 * MIB}


def test_the_backward_pass_has_no_python_stack() -> None:
    of = step()
    gradients = sizes(of)
    blocks = [held(size) for size in gradients] + [held(12345 * 512)]
    some = held(512, "/x/torch/nn/modules/linear.py:forward")
    found = attribute([some, *blocks], of)
    assert found.num_bytes[Owner.GRADIENTS] == sum(gradients)
    assert found.num_bytes[Owner.TEMPORARIES] == 12345 * 512
    assert found.unattributed_bytes == 0


def test_recomputation_in_it_is_a_forward_pass() -> None:
    stack = ("/x/torch/nn/modules/linear.py:forward", "/x/torch/utils/checkpoint.py:unpack_hook")
    engine = "/x/torch/autograd/graph.py:_engine_run_backward"
    found = attribute([held(3 * MIB, *stack, engine), held(5 * MIB, engine)], step())
    assert found.num_bytes == {Owner.SAVED_ACTIVATIONS: 3 * MIB, Owner.TEMPORARIES: 5 * MIB}


@pytest.mark.parametrize("num_states", [0, 2])
@pytest.mark.parametrize("num_gradients", [0, 1])
def test_sizes_alone_tell_weights_states_and_gradients(num_states: int, num_gradients: int) -> None:
    of = step()
    own = sizes(of)
    found = attribute([held(s) for s in own * (1 + num_states + num_gradients)], of).num_bytes
    assert found[Owner.WEIGHTS] == sum(own)
    assert found.get(Owner.OPTIMIZER_STATES, 0) == num_states * sum(own)
    assert found.get(Owner.GRADIENTS, 0) == num_gradients * sum(own)


def test_shards_have_their_own_sizes() -> None:
    of = step(Method.FSDP, 4)
    shards = sizes(of, parts=4)
    assert attribute([held(s) for s in shards], of).num_bytes == {Owner.WEIGHTS: sum(shards)}


def test_nothing_is_guessed() -> None:
    odd = held(777 * 512)
    found = attribute([odd, held(8_519_680), held(8_519_680), held(8_519_680)], step())
    assert found.num_bytes == {Owner.WORKSPACE: 2 * 8_519_680}
    assert found.unattributed_bytes == 777 * 512 + 8_519_680


def test_an_unknown_family_has_no_sizes() -> None:
    of = step(**{"arch.model_type": "never-heard-of", "estimator": "dryrun"})
    found = attribute([held(MIB, early=True)], of)
    assert found.unattributed_bytes == MIB
