"""How Megatron splits the model over the training devices."""

from __future__ import annotations

from slime.utils.arguments.rules.context import Context


def resolve_parallel(context: Context) -> None:
    """Sizes that follow from others: world, data parallel, virtual stages, expert tensor parallel."""
    args = context.args
    args.rank = 0
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.data_parallel_size = max(1, args.world_size // model_size)
    context.fill_none("expert_tensor_parallel_size", args.tensor_model_parallel_size)
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        context.notice("%s has no effect with tensor parallel size 1", context.name("sequence_parallel"))
        args.sequence_parallel = False
    _resolve_virtual_stages(context)
    if args.use_rotary_position_embeddings:
        context.force("position_embedding_type", "rope", context.name("use_rotary_position_embeddings"))
    if args.recompute_activations:
        context.force("recompute_granularity", "selective", context.name("recompute_activations"))
    if args.use_flash_attn:
        context.force("attention_backend", "flash", context.name("use_flash_attn"))


def _resolve_virtual_stages(context: Context) -> None:
    args = context.args
    if args.num_virtual_stages_per_pipeline_rank is not None:
        name = context.shown("num_virtual_stages_per_pipeline_rank")
        context.force("virtual_pipeline_model_parallel_size", args.num_virtual_stages_per_pipeline_rank, name)
    per_stage = args.num_layers_per_virtual_pipeline_stage
    if per_stage is not None and args.num_layers is not None:
        chunk = per_stage * args.pipeline_model_parallel_size
        name = context.shown("num_layers_per_virtual_pipeline_stage")
        if args.num_layers % chunk:
            context.problems.add(f"{args.num_layers} layers don't divide into pipeline stages of {name}")
        else:
            context.force("virtual_pipeline_model_parallel_size", args.num_layers // chunk, name)
    if args.virtual_pipeline_model_parallel_size == 1:
        args.virtual_pipeline_model_parallel_size = None


def check_parallel(context: Context) -> None:
    """World size, layers, heads and experts must divide by the sizes that split them."""
    args = context.args
    tensor, pipeline, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    context.require(
        args.world_size % (tensor * pipeline * cp) == 0,
        f"{args.world_size} training devices are not a multiple of tensor {tensor} x pipeline {pipeline} x "
        f"context {cp} parallel size",
    )
    _check_divides(context, "num_attention_heads", "tensor_model_parallel_size")
    _check_divides(context, "ffn_hidden_size", "tensor_model_parallel_size")
    groups = args.num_query_groups
    if args.group_query_attention and groups:
        context.require(
            groups % tensor == 0 or tensor % groups == 0,
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tensor}: neither divides the other",
        )
    context.require(
        args.use_distributed_optimizer,
        f"{context.name('use_distributed_optimizer')}: the distributed optimizer is always on",
    )
    context.require(
        not args.multi_latent_attention or tensor == 1 or args.sequence_parallel,
        "multi-latent attention with --tensor-model-parallel-size above 1 needs --sequence-parallel: without it "
        "megatron-core 0.16.1 gives wrong gradients of the shared projections",
    )
    context.needs("overlap_p2p_comm", "virtual_pipeline_model_parallel_size")
    _check_pipeline(context)
    _check_prediction_layers(context)
    _check_experts(context)
    _check_recompute(context)


def _check_divides(context: Context, dest: str, by: str) -> None:
    value, size = getattr(context.args, dest), getattr(context.args, by)
    context.require(not value or value % size == 0, f"{context.shown(dest)} is not a multiple of {context.shown(by)}")


def _check_pipeline(context: Context) -> None:
    args = context.args
    stages = args.pipeline_model_parallel_size
    virtual = args.virtual_pipeline_model_parallel_size
    uneven = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if stages == 1:
        for dest in (*uneven, "virtual_pipeline_model_parallel_size"):
            if getattr(args, dest) is not None:
                context.problems.add(f"{context.shown(dest)} needs --pipeline-model-parallel-size above 1")
        return
    if virtual is not None and args.overlap_p2p_comm is False:
        context.problems.add(
            "--no-overlap-p2p-communication with virtual pipeline stages gives wrong gradients in megatron-core 0.16.1"
        )
    special = args.pipeline_model_parallel_layout or args.account_for_embedding_in_pipeline_split
    special = special or args.account_for_loss_in_pipeline_split or any(getattr(args, dest) for dest in uneven)
    if args.num_layers and not special:
        context.require(
            args.num_layers % (stages * (virtual or 1)) == 0,
            f"--num-layers {args.num_layers} is not a multiple of pipeline parallel size {stages}"
            + (f" x {virtual} virtual stages" if virtual else ""),
        )


def _check_prediction_layers(context: Context) -> None:
    """Multi-token-prediction layers stand on the last stage, with a copy of the embedding that they don't train."""
    args = context.args
    if not args.mtp_num_layers:
        return
    name = context.name("mtp_num_layers")
    context.require(
        args.pipeline_model_parallel_layout is None, f"{name} can't be placed by --pipeline-model-parallel-layout"
    )
    context.require(
        args.pipeline_model_parallel_size == 1 or not args.overlap_grad_reduce,
        f"{name} with pipeline stages can't {context.name('overlap_grad_reduce')}: it would wait for the "
        "gradient of the last stage's embedding, which has none",
    )
    context.require(
        not (args.enable_mtp_training and args.lora_rank is not None),
        f"{context.name('enable_mtp_training')}: with --lora-rank only adapters train, and these layers have none",
    )
    context.require(
        args.position_embedding_type in ("rope", "none"),
        f"{name} needs rotary position embeddings, not {args.position_embedding_type}",
    )


def _check_experts(context: Context) -> None:
    args = context.args
    experts = args.num_experts
    expert, expert_tensor = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    if experts is None:
        context.require(expert == 1, f"{context.shown('expert_model_parallel_size')} needs a model with experts")
        return
    tensor = args.tensor_model_parallel_size
    _check_divides(context, "num_experts", "expert_model_parallel_size")
    size = expert * expert_tensor * args.pipeline_model_parallel_size
    context.require(
        args.world_size % size == 0,
        f"{args.world_size} training devices are not a multiple of expert {expert} x expert tensor {expert_tensor} x "
        f"pipeline {args.pipeline_model_parallel_size} parallel size",
    )
    context.require(
        tensor == 1 or args.sequence_parallel,
        "experts with --tensor-model-parallel-size above 1 need --sequence-parallel",
    )
    context.require(
        expert > 1 or expert_tensor == tensor,
        f"--expert-tensor-parallel-size {expert_tensor} with tensor parallel size {tensor} and expert parallel size 1 "
        "gives wrong expert gradients in megatron-core 0.16.1",
    )
    context.require(
        args.moe_token_dispatcher_type != "allgather",
        "--moe-token-dispatcher-type allgather can't take sequences of different lengths: use alltoall or flex",
    )


def _check_recompute(context: Context) -> None:
    args = context.args
    if args.recompute_granularity == "full":
        for dest in ("recompute_method", "recompute_num_layers"):
            context.require(getattr(args, dest), f"--recompute-granularity full needs {context.name(dest)}")
    context.exclusive("lr_warmup_fraction", "lr_warmup_iters")
    context.require(
        not (context.given("cross_entropy_loss_fusion") and args.cross_entropy_loss_fusion),
        "--cross-entropy-loss-fusion rounds gradients to bfloat16: leave it off",
    )
