"""What a ledger is put together from: profiles, placement, counts and static terms of one job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from src.architecture import Decoder, describe
from src.memory.counts import ModelCounts, count_model
from src.memory.losses import Head, head_of
from src.memory.mixed_dtypes import check_uniform_dtypes
from src.memory.placement import Placement, place
from src.memory.profile import Profile, profile
from src.memory.regime import Regime, regime_of
from src.memory.sequence_limits import check_sequence_parallel
from src.memory.size import ZERO, Size, fixed, per_token, total
from src.memory.terms import Term
from src.memory.tuning import check_int8, check_prompt, check_trained_blocks, trains_block
from src.memory.values import Terms, merged
from src.spec import Checkpointing, Gpu, Job, Layout, Method

INPUT_BYTES_PER_TOKEN = 3 * 8
"""Token ids, labels and attention mask, int64, as the Trainer puts them on the GPU."""

WORKSPACE_BYTES = 8_519_680
WORKSPACE_BYTES_HOPPER = 32 * 1024**2
"""cuBLAS workspace per handle and stream (ATen/cuda/CublasHandlePool.cpp)."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that columns are put together from."""

    decoder: Decoder
    regime: Regime
    placement: Placement
    counts: ModelCounts
    stem: Profile
    blocks: tuple[Profile, ...]
    masked: bool
    tail: Profile
    head: Head
    static: Terms

    def recomputes(self, index: int) -> bool:
        """Whether block `index` is recomputed as a whole."""
        return recomputes(self.regime, index)

    def on_host(self) -> Size:
        """Tensors kept for the backward pass that wait in host memory.

        Of a recomputed block its input; of everything else what its nodes save. Pinned memory is
        handed out in powers of two (`CachingHostAllocator`), which is left out.
        """
        if not self.regime.offloads:
            return ZERO
        blocks = (
            block.source if self.recomputes(index) else block.on_host
            for index, block in enumerate(self.blocks)
        )
        head = self.head.profile.on_host.plus(self.head.saved_by_loss)
        return total((self.stem.on_host, *blocks, head))

    @property
    def tied_head(self) -> float:
        """Elements of the head's gradient that no parameter of the head accounts for."""
        lm_head = self.decoder.lm_head
        trained = self.regime.trains_weights and lm_head.tied
        return lm_head.width * lm_head.in_features if trained else 0


def workspace_bytes(gpu: Gpu) -> int:
    """Bytes of a cuBLAS workspace; a step has one for each of two handles."""
    return WORKSPACE_BYTES_HOPPER if gpu.compute_capability >= (9, 0) else WORKSPACE_BYTES


def parts_of(job: Job, method: Method, layout: Layout, gpu: Gpu) -> Parts:
    """Everything that follows from a job under a method.

    Raises:
        UserError: the config, the attention implementation or the method is impossible.
    """
    decoder = describe(job.model)
    check_trained_blocks(job.finetune, decoder.num_layers)
    check_int8(job.finetune, decoder.model_type)
    check_prompt(job.finetune, decoder)
    check_uniform_dtypes(decoder, job, method, layout)
    check_sequence_parallel(decoder, job, layout)
    regime = regime_of(decoder, job, method, layout, gpu)
    counts = count_model(
        decoder,
        finetune=job.finetune,
        tp=layout.tp,
        shard=layout.shard,
        threshold=job.zero.param_persistence_threshold,
    )
    placement = place(decoder, job, method, layout, regime, counts)
    stem = profile(
        (decoder.stem,),
        regime,
        width=0,
        source_bytes=regime.parameter_bytes,
        source_counted=False,
        cuts=regime.splits_sequence,
    )
    masked = regime_of(decoder, job, method, layout, gpu, masked=True)
    regimes = tuple(
        masked if window is not None and job.model_seq_len >= window else regime
        for window in decoder.windows or (None,) * decoder.num_layers
    )
    blocks, stream = _block_profiles(decoder, regimes, stem)
    head = head_of(
        decoder,
        replace(regime, tp=1),
        stream,
        capability=gpu.compute_capability,
        share=regime.stream_share,
        gathers=regime.splits_sequence,
    )
    tail = profile(
        (decoder.tail,),
        replace(regime, tp=1),
        width=decoder.hidden_size,
        source_bytes=stream,
        source_counted=True,
    )
    static = merged(
        placement.static(),
        {
            Term.WEIGHTS: fixed(decoder.buffer_bytes),
            Term.INPUTS: per_token(INPUT_BYTES_PER_TOKEN),
            Term.WORKSPACES: fixed(2 * workspace_bytes(gpu)),
        },
    )
    return Parts(
        decoder=decoder,
        regime=regime,
        placement=placement,
        counts=counts,
        stem=stem,
        blocks=blocks,
        masked=masked in regimes,
        tail=tail,
        head=head,
        static=static,
    )


def recomputes(regime: Regime, index: int) -> bool:
    """Whether a block is recomputed as a whole: the first, and every so many behind it."""
    return regime.checkpointing is Checkpointing.FULL and not index % regime.checkpoint_every


def _block_profiles(
    decoder: Decoder, regimes: tuple[Regime, ...], stem: Profile
) -> tuple[tuple[Profile, ...], int]:
    """Profiles of all blocks, and bytes per element of the last one's output."""
    profiles: list[Profile] = []
    before = stem
    for index, (block, regime) in enumerate(zip(decoder.blocks, regimes, strict=True)):
        trained = trains_block(regime.finetune, index, decoder.num_layers)
        if trained is not regime.trains_weights:
            regime = replace(regime, trains_weights=trained)
        recomputed = recomputes(regime, index)
        before = profile(
            (block,),
            regime,
            width=decoder.hidden_size,
            source_bytes=before.out_bytes,
            source_counted=regime.offloads or not recomputed,
            source_trained=before.carries_gradient,
            out_bytes=regime.block_out_bytes,
            share=regime.stream_share,
            recomputed=recomputed,
        )
        profiles.append(before)
    return tuple(profiles), before.out_bytes
