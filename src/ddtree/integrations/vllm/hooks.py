"""What the plugin overrides, calls or takes apart in vLLM: its signatures as they were in the tested releases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """A function, method or class of vLLM.

    Attributes:
        module: where it is defined or looked up.
        name: in the module, with dots.
        parameters: names of its parameters in order; None where it must only be there.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    @property
    def place(self) -> str:
        return f"{self.module}.{self.name}"


def _hook(place: str, parameters: str | None = None) -> Hook:
    module, name = place.split(":")
    return Hook(f"vllm.{module}", name, None if parameters is None else tuple(parameters.split()))


HOOKS = (
    _hook("entrypoints.launchers.cli_args:make_arg_parser", "parser"),
    _hook("entrypoints.launchers.cli_args:validate_parsed_serve_args", "args"),
    _hook("entrypoints.launchers.api_server.entry:run_server", "args uvicorn_kwargs"),
    _hook("entrypoints.serve.utils.api_utils:cli_env_setup", ""),
    _hook("v1.engine.core_client:AsyncMPClient.call_utility_all_async", "self method args"),
    _hook("v1.engine.core:EngineCore.collective_rpc", "self method timeout args kwargs"),
    _hook("exceptions:VLLMValidationError.__init__", "self message parameter value"),
    _hook("v1.sample.logits_processor.interface:LogitsProcessor.validate_params", "cls sampling_params"),
    _hook(
        "v1.sample.logits_processor:validate_logits_processors_parameters",
        "logits_processors sampling_params",
    ),
    _hook(
        "v1.sample.logits_processor:build_logitsprocs",
        "vllm_config device is_pin_memory is_pooling_model custom_logitsprocs",
    ),
    _hook("v1.worker.cpu_worker:CPUModelRunner"),
    _hook("v1.worker.cpu_worker:CPUWorker.init_device", "self"),
    _hook("v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model", "self"),
    _hook("v1.worker.cpu_model_runner:CPUModelRunner.__init__", "self vllm_config device"),
    _hook("v1.worker.cpu_model_runner:CPUModelRunner.load_model", "self load_dummy_weights"),
    _hook(
        "v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache",
        "self kv_cache_config is_profiling kv_cache_allocation_context",
    ),
    _hook(
        "v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "self scheduler_output intermediate_tensors",
    ),
    _hook("v1.worker.gpu_model_runner:GPUModelRunner._update_states", "self scheduler_output"),
    _hook(
        "v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
        "self scheduler_output num_scheduled_tokens",
    ),
    _hook(
        "v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        "self num_tokens num_reqs max_query_len num_tokens_padded num_reqs_padded ubatch_slices "
        "logits_indices max_num_sampled_tokens use_spec_decode for_cudagraph_capture "
        "num_scheduled_tokens slot_mappings",
    ),
    _hook("v1.worker.gpu_model_runner:GPUModelRunner._sample", "self logits spec_decode_metadata"),
    _hook("v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter", "self common_attn_metadata"),
    _hook(
        "v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
        "self scheduler_output sampled_token_ids sampling_metadata hidden_states sample_hidden_states "
        "aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings",
    ),
    _hook("v1.outputs:SamplerOutput", "sampled_token_ids logprobs_tensors"),
    _hook("v1.sample.sampler:Sampler.compute_logprobs", "logits"),
    _hook("v1.sample.sampler:Sampler.gather_logprobs", "logprobs num_logprobs token_ids"),
    _hook("v1.spec_decode.custom_class_proposer:create_custom_proposer", "vllm_config"),
    _hook("model_executor.models.interfaces:supports_eagle3", "model"),
    _hook(
        "_custom_ops:cpu_attn_reshape_and_cache",
        "key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype",
    ),
    _hook("v1.attention.backends.registry:register_backend", "backend class_path is_mamba"),
    _hook(
        "v1.attention.backends.cpu_attn:CPUAttentionMetadata",
        "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping "
        "scheduler_metadata causal dynamic_causal use_sdpa_prefill num_decode_tokens sdpa_attn_masks "
        "sdpa_start_loc encoder_cache",
    ),
    _hook(
        "v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.__init__",
        "self kv_cache_spec layer_names vllm_config device",
    ),
    _hook(
        "v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        "self common_prefix_len common_attn_metadata fast_build",
    ),
    _hook(
        "v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers",
        "self layer_names",
    ),
    _hook(
        "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    _hook("v1.attention.backends.cpu_attn:CPUAttentionBackend.get_impl_cls", ""),
    _hook("v1.attention.backends.cpu_attn:CPUAttentionBackend.get_builder_cls", ""),
    _hook("v1.attention.selector:_cached_get_attn_backend"),
    _hook("v1.worker.cpu_worker:CPUWorker.shutdown", "self"),
    _hook("v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens", "self grammar_output"),
    _hook(
        "v1.core.sched.output:NewRequestData",
        "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids num_computed_tokens "
        "lora_request prompt_embeds prompt_is_token_ids prefill_token_ids replay_start",
    ),
    _hook(
        "v1.core.sched.output:CachedRequestData",
        "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens num_output_tokens",
    ),
    _hook("v1.core.sched.output:SchedulerOutput.make_empty", "cls"),
)
