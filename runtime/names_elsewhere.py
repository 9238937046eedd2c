"""Settings of TRL, verl, OpenRLHF and transformers: our setting for each name, or why there is none.

    python -m runtime.names_elsewhere        # print the whole table

The error about an unknown setting reads this table (runtime/config.py), and the tables of
docs/from_trl_or_verl.md are tested against it. A name is the last part of a setting, or the last parts with a
dot (`val_kwargs.n`); `critic.*` is everything below `critic`.
"""

AS_TEXTS = "samples.jsonl holds completions of every N-th step"
FREQUENCY = "every N steps; the first and the last step are always evaluated"
STEPS = "rollouts: ratio x train.num_steps"
TURNS = "turns of the policy"

# (our setting or None, names elsewhere, how the value differs or why there is no counterpart)
TABLE: list[tuple[str | None, str, str]] = [
    ("model.path", "model_name_or_path model_name pretrain hf_checkpoint", ""),
    ("model.ep_size", "expert_model_parallel_size expert_parallel_size", ""),
    ("model.dtype", "bf16 torch_dtype", "bfloat16 is true"),
    ("model.activation_checkpointing", "gradient_checkpointing enable_gradient_checkpointing", ""),
    ("model.freeze_router", "freeze_moe_router", ""),
    ("lora.rank", "lora_rank lora_r use_peft", "a number; null: no adapters"),
    ("lora.alpha", "lora_alpha", ""),
    ("lora.targets", "target_modules lora_target_modules", "attention, mlp, experts"),
    ("carry.share", "partial_rollout", "a share of groups; null: wait for all"),
    ("data.train", "dataset_name train_files train_dataset prompt_data", "a list, [{path: ...}]"),
    ("data.eval", "val_files eval_dataset eval_data", "a list, [{path: ..., split: ...}]"),
    ("data.train[].subset", "dataset_config dataset_config_name", ""),
    ("data.train[].split", "dataset_train_split prompt_split dataset_split", ""),
    ("data.eval[].split", "dataset_test_split eval_split", ""),
    ("data.train[].columns", "prompt_key input_key", "{prompt: NAME}"),
    ("data.train[].columns", "label_key", "{answer: NAME}"),
    ("data.train[].template", "input_template", "with the place {prompt}"),
    ("data.train[].limit", "max_samples train_max_samples", ""),
    ("data.eval[].limit", "val_max_samples", ""),
    ("data.train[].weight", "prompt_data_probs", "one for each set"),
    ("data.chat", "apply_chat_template", "always is true"),
    ("data.chat_template_args", "chat_template_kwargs apply_chat_template_kwargs", ""),
    ("data.tools", "tool_config_path multi_turn.enable", "a list of Python functions"),
    ("data.environment", "environment_factory agent_func_path", "a class with reset and step"),
    ("data.on_bad_row", "filter_overlong_prompts truncation", "drop or stop; no prompt is cut"),
    ("rollout.prompts_per_step", "train_batch_size gen_batch_size rollout_batch_size "
     "num_prompts_per_step", "prompts"),
    ("rollout.prompts_per_step", "generation_batch_size", "prompts: divide by rollout.group_size"),
    ("rollout.group_size", "num_generations n n_samples_per_prompt num_generations_per_prompt "
     "rollouts_per_example", ""),
    ("rollout.max_prompt_tokens", "max_prompt_length prompt_max_len", ""),
    ("rollout.max_prompt_tokens", "vllm_max_model_length max_model_len max_seq_length max_len",
     "without the completion, which is rollout.max_new_tokens"),
    ("rollout.max_new_tokens",
     "max_completion_length max_response_length max_tokens generate_max_len response_length "
     "rollout_max_response_len", ""),
    ("rollout.temperature", "rollout_temperature", ""),
    ("rollout.tensor_parallel",
     "tensor_model_parallel_size vllm_tensor_parallel_size tensor_parallel_size", ""),
    ("rollout.max_turns", "max_assistant_turns max_user_turns max_tool_calling_iterations "
     "max_rollout_turns", TURNS),
    ("rollout.max_tool_chars", "max_tool_response_length", "characters"),
    ("rollout.kv_cache_gib", "gpu_memory_utilization vllm_gpu_memory_utilization",
     "GiB of keys and values on a GPU, no share of the card; null takes what training leaves"),
    ("rollout.sleep_level", "vllm_enable_sleep_mode free_cache_engine enable_sleep_mode",
     "2 is true, 0 is false"),
    ("rollout.prefix_caching", "enable_prefix_caching vllm_enable_prefix_caching", ""),
    ("rollout.fp8", "quantization", "on or off"),
    ("rollout.stop", "stop_strings stop_token_ids", "end tokens of the model's folder need no setting"),
    ("data.train[].kind", "reward_funcs reward_weights custom_reward_function reward_manager remote_rm_url "
     "reward_fn_key rm_type custom_rm_path",
     "a verifier, path/file.py:function, or a weighted sum such as 0.8*math + 0.2*mine.py:score"),
    ("reward.judge_path", "reward_model reward_model.path reward_model.model.path reward_model_path "
     "reward_pretrain", "with reward.judge"),
    ("reward.overlong_buffer", "overlong_buffer_cfg overlong_buffer_len overlong_buffer.enable "
     "overlong_buffer.len", "tokens; 0 is off"),
    ("reward.overlong_coef", "penalty_factor overlong_penalty_factor", ""),
    ("zero_variance.refill", "filter_groups dynamic_filtering use_dynamic_sampling "
     "dynamic_sampling_filter_path", "with zero_variance.drop"),
    ("zero_variance.max_rounds", "max_num_gen_batches dynamic_sampling_max_gen_batches", "afterwards a "
     "short batch is trained on"),
    ("algorithm.kl_coef", "beta kl_loss_coef reference_policy_kl_penalty", ""),
    ("algorithm.kl_coef", "use_kl_loss", "0 is false"),
    ("algorithm.kl_coef", "init_kl_coef use_kl_in_reward", "a term of the loss; no KL is in the reward"),
    ("algorithm.kl_coef", "kl_loss_type kl_estimator", "the estimate is always k3, verl's low_var_kl"),
    ("algorithm.clip_eps_low", "epsilon clip_ratio clip_ratio_low cliprange eps_clip eps_clip_low_high "
     "ratio_clip_min",
     "the upper bound is algorithm.clip_eps_high"),
    ("algorithm.clip_eps_high", "epsilon_high clip_ratio_high ratio_clip_max eps_clip_high", "5 in "
     "TRL's CISPO is 4 here"),
    ("algorithm.clip_cap", "delta clip_ratio_c dual_clip ratio_clip_c", ""),
    ("algorithm.leave_out_cut", "mask_truncated_completions overlong_filtering", ""),
    ("algorithm.gain_args", "sapo_temperature_pos sapo_temperature_neg off_policy_mask_threshold tau_pos "
     "tau_neg", "arguments of a plug-in, algorithm.gain"),
    ("algorithm.select_args", "top_entropy_quantile", "arguments of a plug-in, algorithm.select"),
    ("algorithm.loss_agg", "loss_type loss_agg_mode token_level_loss", "docs/from_trl_or_verl.md lists "
     "the values"),
    ("algorithm.ratio_level", "loss_mode importance_sampling_level policy_loss_type "
     "sequence_level_importance_ratios",
     "docs/from_trl_or_verl.md lists the values"),
    ("algorithm.adv_norm", "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm",
     "group_std is group or true, mean_only is none or false"),
    ("algorithm.adv_norm", "adv_estimator advantage_estimator", "methods are YAMLs of experiments/methods"),
    ("algorithm.advantage", "multi_objective_aggregation", "GDPO is experiments/plugins/gdpo.py:gdpo"),
    ("algorithm.rollout_correction", "vllm_importance_sampling_correction vllm_importance_sampling_mode "
     "rollout_is enable_vllm_is_correction use_importance_sampling_correction use_tis", "a choice; "
     "docs/from_trl_or_verl.md lists YAMLs"),
    ("algorithm.rollout_correction_cap", "vllm_importance_sampling_clip_max vllm_importance_sampling_cap "
     "rollout_is_threshold truncated_importance_sampling_ratio tis_clip vllm_is_truncated_threshold", ""),
    ("algorithm.rollout_correction_floor", "vllm_importance_sampling_clip_min tis_clip_low", ""),
    ("algorithm.old_policy", "bypass_mode", "rollout is true"),
    ("algorithm.router_replay", "enable_rollout_routing_replay use_rollout_routing_replay "
     "use_routing_replay", "r2 or r3"),
    ("train.num_steps", "max_steps total_training_steps max_num_steps num_rollout", "rollouts, as in "
     "verl; TRL counts updates"),
    ("train.num_steps", "num_train_epochs total_epochs num_episodes",
     "rollouts: epochs x prompts / rollout.prompts_per_step"),
    ("train.minibatches_per_step", "steps_per_generation num_mini_batches "
     "num_steps_per_rollout", "updates of a rollout"),
    ("train.minibatches_per_step", "ppo_mini_batch_size",
     "updates of a rollout: train_batch_size / ppo_mini_batch_size"),
    ("train.micro_batch_tokens", "per_device_train_batch_size gradient_accumulation_steps "
     "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu use_dynamic_bsz "
     "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu micro_train_batch_size "
     "micro_rollout_batch_size max_tokens_per_gpu use_dynamic_batch_size train_micro_batch_size "
     "logprob_batch_size", "padded tokens of a forward on one GPU; never changes the loss"),
    ("train.passes_per_rollout", "num_iterations ppo_epochs num_ppo_epochs max_epochs", ""),
    ("train.balance", "balance_batch balance_data", ""),
    ("train.learning_rate", "lr actor_learning_rate actor_lr", ""),
    ("train.lr_schedule", "lr_scheduler_type lr_scheduler lr_decay_style", ""),
    ("train.lr_schedule_args", "lr_scheduler_kwargs min_lr_ratio num_cycles", "with train.lr_schedule"),
    ("train.warmup_steps", "lr_warmup_steps", "rollouts"),
    ("train.warmup_steps", "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio", STEPS),
    ("train.betas", "adam_beta1 adam_beta2 adam_betas optim.betas", "[beta1, beta2]"),
    ("train.weight_decay", "l2", ""),
    ("train.max_grad_norm", "grad_clip clip_grad gradient_clipping max_norm grad_norm_clip", ""),
    ("train.offload_optimizer", "optimizer_offload adam_offload", "with train.zero_stage 2"),
    ("train.seed", "data_seed random_seed", ""),
    ("eval.every", "eval_steps test_freq eval_interval val_period", ""),
    ("eval.every", "eval_strategy evaluation_strategy val_before_train eval_on_start "
     "val_at_start", FREQUENCY),
    ("eval.num_samples", "num_generations_eval val_kwargs.n eval_n_samples_per_prompt "
     "n_samples_per_eval_prompt",
     "a greedy completion is added"),
    ("eval.max_new_tokens", "val_kwargs.max_tokens eval_max_response_len", ""),
    ("eval.num_texts", "log_val_generations validation_data_dir", "completions that an evaluation keeps"),
    ("checkpoint.every", "save_steps save_freq save_interval save_period ckpt.interval", ""),
    ("checkpoint.every", "save_strategy", "every N steps, and at the end"),
    ("checkpoint.keep", "save_total_limit max_actor_ckpt_to_keep max_ckpt_to_keep max_ckpt_num", ""),
    ("checkpoint.resume", "resume_from_checkpoint resume_mode load_checkpoint",
     "the same command resumes from run.dir by default"),
    ("run.dir", "output_dir default_local_dir save_path ckpt_path logging_dir log_dir", ""),
    ("run.log_every", "logging_steps", "for the console and samples.jsonl"),
    ("run.log_every", "logging_strategy", "every N steps"),
    ("run.log_every", "log_completions num_completions_to_print rollout_data_dir", AS_TEXTS),
    ("run.trackers", "report_to logger use_wandb use_tensorboard wandb_enabled", "a list, for example "
     "[wandb]"),
    ("run.timeout_s", "ddp_timeout nccl_timeout", ""),
    ("tracking.project", "project_name wandb_project wandb.project", ""),
    ("tracking.name", "run_name experiment_name wandb_run_name exp_name wandb.name", ""),
    ("tracking.entity", "wandb_entity wandb_org", ""),
    ("tracking.tags", "wandb_tags wandb_group", "a list"),
    (None, "top_p top_k min_p vllm_top_p repetition_penalty presence_penalty frequency_penalty "
     "rollout_top_p rollout_top_k eval_top_p",
     "rollouts sample the whole distribution, because ratios need its probabilities"),
    (None, "val_kwargs.temperature val_kwargs.do_sample eval_temperature val_kwargs",
     "evaluations sample at rollout.temperature and add a greedy completion"),
    (None, "entropy_coeff entropy_coef ent_coef entropy_loss_coef use_adaptive_entropy",
     "a larger algorithm.clip_eps_high or a gain plug-in keeps the entropy up, without a bonus"),
    (None, "critic.* critic value_model vf_coef gae_lambda lam lambd gamma cliprange_value value_clip "
     "critic_learning_rate critic_pretrain", "advantages come from groups, without a critic"),
    (None, "kl_ctrl kl_penalty kl_target kl_horizon", "the KL is a term of the loss, algorithm.kl_coef"),
    (None, "lora_dropout peft_config load_in_4bit load_in_8bit",
     "adapters (section lora) have no dropout, and weights under them keep model.dtype"),
    (None, "callbacks callback", "docs/plugins.md has the hooks, metrics.jsonl a line for each step"),
    (None, "n_gpus_per_node nnodes num_nodes actor_num_nodes actor_num_gpus_per_node vllm_num_engines "
     "colocate_all_models ray_kwargs ray_init async_train hybrid_engine",
     "torchrun sets nodes and GPUs; trainer and engine share all of them"),
    (None, "max_async_level async_level max_off_policy_steps async_grpo",
     "rollouts and updates take turns; rollout.lag trains on completions of an earlier policy"),
    (None, "aux_loss_coef router_aux_loss_coef moe_router_load_balancing_type",
     "no loss balances the experts; the metric max_vio shows their load"),
    (None, "reward_kwargs", "a reward function reads columns of its row; reward.overlong_buffer is a "
     "penalty"),
    (None, "val_only", "experiments/evaluate.py evaluates a model without training"),
    (None, "agent.num_workers", "episodes run in the engine of their rank; reward.num_workers are verifiers"),
    (None, "use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_base_url "
     "vllm_sync_backend load_format", "vLLM always runs inside of the ranks, without a server"),
    (None, "max_num_batched_tokens enable_chunked_prefill vllm_model_impl swap_space disable_log_stats "
     "engine_kwargs", "vLLM's default holds"),
    (None, "deepspeed fsdp strategy fsdp_config megatron param_offload pipeline_model_parallel_size "
     "context_parallel_size ulysses_sequence_parallel_size sequence_parallel_size ring_attn_size zpg",
     "DeepSpeed ZeRO (train.zero_stage) with expert parallelism is the only strategy"),
    (None, "attn_implementation flash_attn use_liger_kernel use_liger_loss torch_compile use_torch_compile "
     "use_remove_padding packing_samples use_fused_kernels trust_remote_code",
     "the model's code is our own; model.logprob_kernel and model.expert_kernel choose its kernels"),
    (None, "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps enable_ema ema_beta",
     "the reference policy is the start of the run and never moves"),
    (None, "shuffle shuffle_dataset dataloader_num_workers dataset_num_proc remove_unused_columns drop_last "
     "return_raw_chat curriculum", "an epoch visits every prompt once, in an order that train.seed fixes"),
    (None, "per_device_eval_batch_size val_batch_size do_eval eval_delay",
     "the engine chooses batches; data.eval=[] switches evaluations off"),
    (None, "load_best_model_at_end keep_top_k metric_for_best_model greater_is_better push_to_hub "
     "hub_model_id "
     "save_only_model save_contents", "the last policy is exported to run.dir/model, checkpoints are whole"),
    (None, "normalize_reward reward_clip_range missing_eos_penalty whiten_rewards",
     "rewards stay as they are; algorithm.adv_norm normalises the advantages of a group"),
    (None, "adam_epsilon optimizer_type optim_args", "the optimizer is AdamW in float32, epsilon 1e-8"),
]  # fmt: skip

# {name elsewhere: (our setting or None, how its value differs or why there is none)}
NAMES_ELSEWHERE = {name: (ours, note) for ours, names, note in TABLE for name in names.split()}


def entry_of(name: str) -> tuple[str | None, str] | None:
    """Return the entry of a dotted name: of a group such as critic.*, else of its longest and last part."""
    parts = name.split(".")
    keys = [f"{part}.*" for part in parts]
    for length in range(len(parts), 0, -1):
        keys += [".".join(parts[i : i + length]) for i in range(len(parts) - length, -1, -1)]
    return next((NAMES_ELSEWHERE[key] for key in keys if key in NAMES_ELSEWHERE), None)


if __name__ == "__main__":
    for name, (ours, note) in NAMES_ELSEWHERE.items():
        print(f"{name:<36} {ours or 'none':<36} {note}".rstrip())
