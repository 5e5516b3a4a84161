"""Name patterns of configuration entries that affect neither the time nor the memory of a step.

Entries that match no pattern are reported as not in the prediction.  Dashes count as underscores.
"""

from __future__ import annotations

import re
from fnmatch import translate
from functools import cache
from typing import Any

_LAUNCHER = """
    nproc_per_node nnodes node_rank master_addr master_port rdzv_* local_rank local_ranks_filter rank world_size
    hostfile num_gpus num_nodes ntasks ntasks_per_node nodelist launcher job_name max_restarts tee redirects include
    exclude role standalone nodes export partition account gres mpi kill_on_bad_exit container_* mounts
    rdzv_backend rdzv_conf rdzv_endpoint rdzv_id event_log_handler local_addr log_dir logs_specs module monitor_interval
    no_python numa_binding run_path shutdown_timeout signals_to_handle start_method virtual_local_rank
    autotuning bind_core_list bind_cores_to_rank elastic_training enable_each_rank_log force_multi launcher_args
    max_elastic_nodes min_elastic_nodes no_local_rank no_ssh no_ssh_check save_pid ssh_port
    num_processes num_machines machine_rank main_process_ip main_process_port config_file multi_gpu
    cpus_per_task gpus gpus_per_node gpus_per_task cpu_bind gpu_bind mem_bind threads_per_core unbuffered label np
    allow_run_as_root worker_num local_worker_num bind_core cluster_time_out join sched_host sched_port
"""
LAUNCHER_FLAGS = frozenset(f"--{name.replace('_', '-')}" for name in _LAUNCHER.split() if "*" not in name)
"""The arguments of torchrun, deepspeed, accelerate, Slurm and MindSpore.

Sources: torch 2.11, distributed/run.py; DeepSpeed, launcher/runner.py; accelerate, commands/launch.py; srun(1); msrun.
"""
_TRAINING = """
    lr lr_* min_lr max_lr *_lr *.lr *.min_lr *learning_rate* *warmup* *weight_decay* adam_* *betas *beta1 *beta2 eps
    *_eps *.eps *epsilon *amsgrad clip_grad *gradient_clipping *max_norm *max_grad_norm *grad_clip* init_method_*
    *seed train_iters train_samples eval_iters eval_interval *epochs *max_steps *total_steps steps train_steps
    iterations
    loss_scale* *initial_loss_scale *min_loss_scale hysteresis override_opt_param_scheduler override_opt_*
    use_checkpoint_opt_* finetune check_for_nan* no_check_for_nan* check_for_spiky* check_for_large_grads
    no_load_optim no_load_rng no_save_optim no_save_rng lr_scheduler.* scheduler.* mtp_loss_scaling_factor
    calculate_per_token_loss muon_momentum muon_weight_decay* muon_use_nesterov muon_scale_mode
    train_tokens reset_progress reset_iteration no_load_lr_state norm_target_loss loss_on_targets_only num_epoch
    muon_extra_scale_factor sgd_momentum data_parallel_random_init perform_initialization
"""
_MODEL = """
    rotary_base rotary_percent rotary_interleaved rotary_scaling_factor rotary_seq_len_interpolation_factor
    rotary_emb_base rope_theta rope_scaling* rope_type use_rope_scaling norm_epsilon layernorm_epsilon *norm_eps
    attention_softmax_in_fp32 mscale mscale_all_dim beta_fast beta_slow moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_load_balancing_type moe_router_score_function moe_router_bias_update_rate moe_router_enable_expert_bias
    moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
    moe_router_force_load_balancing embed_layernorm
    moe_router_dtype moe_per_layer_logging moe_input_jitter_eps apply_layernorm_1p norm_init_weight
"""
_FILES = """
    save save_interval save_retain_interval load load_* ckpt_format ckpt_step ckpt_convert_* dist_ckpt_* async_save
    use_dist_ckpt* auto_detect_ckpt_format use_persistent_ckpt_worker non_persistent_* pretrained_checkpoint
    exit_on_missing_checkpoint ckpt_fully_parallel_* ckpt_assume_constant_structure
    !heterogeneous* *_path *_dir *_folder data_* !data_parallel* data split mock_data tokenizer_* tokenizer
    vocab_file vocab_extra_ids     tiktoken_* merge_file merges_file reset_position_ids reset_attention_mask
    eod_mask_loss num_workers
    num_dataset_builder_threads dataloader_type no_mmap_bin_files mmap_warmup legacy_tokenizer no_create_attention_mask*
    make_vocab_size_divisible_by exit_* short_seq_prob mask_prob null_tokenizer* train_data_path valid_data_path
    *_weighted_split_paths abort_on_unmet_fused_kernel_constraints update_weight_buffer_size use_wandb
    test_data_path per_split_data_args_path cache_dir output_dir remote_save_url
"""
_MONITORING = """
    log_* no_log_* logging_level tensorboard_* disable_tensorboard no_tensorboard wandb_* disable_wandb mlflow_*
    disable_mlflow one_logger_* enable_one_logger no_one_logger profile profile_* use_pytorch_profiler timing_log_*
    record_memory_history memory_snapshot_* distributed_backend distributed_timeout_* *throughput steps_per_print
    wall_clock_breakdown *.verbose print_* config_logger_dir error_injection_* rerun_mode straggler_* log_straggler
    adlr_* app_tag_* exp_name description disable_last_saving auto_continue_train use_rocm_mem_info*
    virtual_pipeline_model_parallel_size barrier_with_l1_time no_barrier_with_level_1_timing
    nccl_communicator_config_path dump_state manual_gc manual_gc_interval trust_remote_code
    result_rejected_tracker_filename
"""
_COMMON = _LAUNCHER + _TRAINING + _MODEL + _FILES + _MONITORING
_OFF = (False, None, 0, 0.0, "0", "0.0", "false", "False", "null")
_COSTLY_WHEN_OFF = re.compile("level|overlap|fus|reshard|size|threshold|opt_level|warm")
"""Parts of the names of entries whose value 0 or off may affect time or memory."""


@cache
def _harmless_pattern(framework_patterns: str) -> re.Pattern[str]:
    names = (_COMMON + framework_patterns).replace("-", "_").split()
    free = "|".join(translate(name) for name in names if name[0] != "!")
    never = "|".join(translate(name[1:]) for name in names if name[0] == "!")
    return re.compile(f"(?!{never})(?:{free})")


def is_harmless(name: str, value: Any, framework_patterns: str) -> bool:
    """Tell whether an entry is known to affect neither the time nor the memory of a step.

    Args:
        name: The entry's name.
        value: The entry's value; an entry that is off is harmless, unless its name matches _COSTLY_WHEN_OFF.
        framework_patterns: Additional name patterns of the framework, separated by blanks.
    """
    plain = name.removeprefix("--").replace("-", "_").lower()
    if value in _OFF and not isinstance(value, list | dict | tuple) and not _COSTLY_WHEN_OFF.search(plain):
        return True
    return _harmless_pattern(framework_patterns).fullmatch(plain) is not None
