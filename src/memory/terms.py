"""The rows and columns of the ledger."""

from __future__ import annotations

from enum import StrEnum


class Instant(StrEnum):
    """Moments of the (second) training step at which live bytes can peak, in order."""

    LOAD = "load"
    FORWARD_END = "forward_end"
    LOSS_BACKWARD = "loss_backward"
    LAST_BLOCK_BACKWARD = "last_block_backward"
    FIRST_BLOCK_BACKWARD = "first_block_backward"
    GRADIENT_SYNC = "gradient_sync"
    OPTIMIZER_STEP = "optimizer_step"


class Term(StrEnum):
    """Kinds of bytes.

    WEIGHTS: the weights this GPU stores (its shard, where sharded), and the model's tables.
    MASTER_WEIGHTS: DeepSpeed's flat fp32 partition.
    GATHERED_WEIGHTS: whole weights gathered from shards, and all-gather buffers.
    CAST_WEIGHTS: half-precision copies that autocast makes.
    GRADIENTS: gradients this GPU keeps. UNSHARDED_GRADIENTS: whole ones before they are reduced.
    OPTIMIZER_STATES, OPTIMIZER_TEMPORARIES: between steps; during the step only.
    COMMUNICATION_BUFFERS: DDP's and DeepSpeed's buckets, reduce-scatter buffers.
    CHECKPOINTS: block inputs kept by activation checkpointing.
    SAVED_ACTIVATIONS: tensors kept for the backward pass; of one block where it is recomputed.
    DROPOUT_MASKS, ATTENTION_SCORES: those of them that are masks, or S x S.
    ATTENTION_MASK: the S x S mask that a forward pass hands to every block.
    ACTIVATION_GRADIENTS: gradients in flight, and temporaries of the operation at work.
    LOGITS: the model's output, and its fp32 copies. LOSS_TEMPORARIES: the loss's own tensors.
    INPUTS: token ids, labels, mask. WORKSPACES: cuBLAS.
    """

    WEIGHTS = "weights"
    MASTER_WEIGHTS = "master_weights"
    GATHERED_WEIGHTS = "gathered_weights"
    CAST_WEIGHTS = "cast_weights"
    GRADIENTS = "gradients"
    UNSHARDED_GRADIENTS = "unsharded_gradients"
    OPTIMIZER_STATES = "optimizer_states"
    OPTIMIZER_TEMPORARIES = "optimizer_temporaries"
    COMMUNICATION_BUFFERS = "communication_buffers"
    CHECKPOINTS = "checkpoints"
    SAVED_ACTIVATIONS = "saved_activations"
    DROPOUT_MASKS = "dropout_masks"
    ATTENTION_SCORES = "attention_scores"
    ATTENTION_MASK = "attention_mask"
    ACTIVATION_GRADIENTS = "activation_gradients"
    LOGITS = "logits"
    LOSS_TEMPORARIES = "loss_temporaries"
    INPUTS = "inputs"
    WORKSPACES = "workspaces"
