"""Settings under other names: in earlier versions of this project, and in TRL, transformers and verl.

RENAMED, REMOVED and OLD_VALUES are all that the project knows of its earlier settings. They serve

    a command line or a YAML   the error about an old name or value names the successor (runtime/config.py)
    a checkpoint               a resume reads its settings by their present names (runtime/checkpoint.py)
    a record of a run          report.py --check compares its settings, run.py --row repeats them

    a row of a declared study  keeps the names of its time (runtime/config.py: read_yaml)

For example, zero_variance.teacher=x raises "of an earlier version, now teacher.path", and a checkpoint that
holds the old name resumes. RENAMED_COUNTERS does the same for the counters of a checkpoint.
"""

import re

# {name of a setting in an earlier version: its present name, with the same values and the same default}
RENAMED: dict[str, str] = {
    "algorithm.score_centering": "centering.enabled",
    "rollout.topk_logprobs": "centering.topk",
    "zero_variance.teacher": "teacher.path",
    "zero_variance.teacher_coef": "teacher.coef",
    "zero_variance.teacher_groups": "teacher.groups",
    "zero_variance.teacher_scores": "teacher.scores",
    "zero_variance.teacher_token_cost": "teacher.token_cost",
}

# {counter of runtime.checkpoint.TrainState: keys of its present place}
RENAMED_COUNTERS = {
    "charged_for_teacher": ("charged_tokens",),
    "teacher": ("extras", "teacher", "weights"),
    "teacher_scores": ("extras", "teacher", "scores"),
}

# {name: (old default, successor)}. The old default had no effect, so that old checkpoints and records that
# hold it stay valid without the setting.
REMOVED: dict[str, tuple[object, str]] = {
    "algorithm.covariance": ("clip", "algorithm.select=experiments/plugins/clip_cov.py:clip_cov"),
    "algorithm.covariance_kl_coef": (1.0, "gone: no run showed a gain"),
    "algorithm.covariance_range": ([1.0, 5.0], "algorithm.select_args={low: 1.0, high: 5.0}"),
    "algorithm.covariance_share": (0.0, "algorithm.select_args={fraction: 0.0002}"),
    "algorithm.gamma_decays": ([3.0, 2.0], "algorithm.gain_args of experiments/plugins/vespo.py:vespo"),
    "algorithm.gamma_powers": ([2.0, 3.0], "algorithm.gain_args of experiments/plugins/vespo.py:vespo"),
    "algorithm.kl_form": ("k3", "gone: algorithm.kl_coef penalises k3"),
    "algorithm.off_policy_mask": (
        0.0,
        "algorithm.gain=experiments/plugins/off_policy_mask.py:off_policy_mask",
    ),
    "algorithm.part_norm": ("after_sum", "algorithm.advantage=experiments/plugins/gdpo.py:gdpo"),
    "algorithm.soft_temperatures": ([1.0, 1.05], "algorithm.gain_args of experiments/plugins/sapo.py:sapo"),
    "algorithm.top_entropy": (1.0, "algorithm.select=experiments/plugins/top_entropy.py:top_entropy"),
    "reward.judge_certainty": (0.0, "gone: no run showed a gain"),
    "zero_variance.tournament": (False, "gone: no study had a row with it"),
}

# {setting: {value of an earlier version: successor}}
OLD_VALUES: dict[str, dict[object, str]] = {
    "algorithm.adv_norm": {
        "batch_std": "algorithm.advantage=experiments/plugins/batch_std.py:batch_std",
        "group_mean": "algorithm.advantage=experiments/plugins/maxrl.py:maxrl",
        "leave_one_out": "algorithm.advantage=experiments/plugins/rloo.py:rloo",
    },
    "algorithm.clip_mode": {
        "binary_kl": "algorithm.gain=experiments/plugins/dppo.py:binary_kl",
        "gamma": "algorithm.gain=experiments/plugins/vespo.py:vespo",
        "soft": "algorithm.gain=experiments/plugins/sapo.py:sapo",
        "total_variation": "algorithm.gain=experiments/plugins/dppo.py:total_variation",
    },
}


def successor_of(name: str, value: object = None) -> str | None:
    """Name what takes the place of an old setting, or of an old value of a setting; None for any other."""
    if name in RENAMED:
        return RENAMED[name]
    if name in REMOVED:
        return REMOVED[name][1]
    return OLD_VALUES.get(name, {}).get(value) if isinstance(value, str) else None


def present_name(name: str) -> str:
    """Return the present name of a setting, also behind stages[0], for example stages[0].teacher.path."""
    place, plain = re.fullmatch(r"((?:stages\[\d+\]\.)?)(.*)", name).groups()
    return place + RENAMED.get(plain, plain)


def had_no_effect(name: str, value: object) -> bool:
    """Tell whether a removed setting has its old default."""
    plain = re.sub(r"^stages\[\d+\]\.", "", name)
    return plain in REMOVED and value == REMOVED[plain][0]


def with_present_names(settings: dict[str, object]) -> dict[str, object]:
    """Return the settings of a record, {"section.key": value}, by their present names.

    Removed settings that had an effect stay, so that the caller can refuse or name them.
    """
    kept = {name: value for name, value in settings.items() if not had_no_effect(name, value)}
    return {present_name(name): value for name, value in kept.items()}


def present_settings(dump: dict) -> dict:
    """Do the same for sections of settings and their stages, as in config.yaml and in checkpoints."""
    present: dict = {}
    for section, values in dump.items():
        if section == "stages":
            present[section] = [present_settings(stage) for stage in values]
        elif isinstance(values, dict) and values:
            flat = with_present_names({f"{section}.{key}": value for key, value in values.items()})
            for name, value in flat.items():
                present_section, _, key = name.partition(".")
                present.setdefault(present_section, {})[key] = value
        else:
            present[section] = values
    return present


def present_counters(counters: dict) -> dict:
    """Return the counters of a checkpoint's state.json in their present places; None has no place."""
    present = {name: value for name, value in counters.items() if name not in RENAMED_COUNTERS}
    for old, (*groups, key) in RENAMED_COUNTERS.items():
        if counters.get(old) is not None:
            inner = present
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[key] = counters[old]
    return present


# ------------------------------------------------------------------------------------------------------------
# Other libraries
# ------------------------------------------------------------------------------------------------------------
# {last part of the setting's name in TRL, transformers or verl: our setting}. For example,
# train.num_generations gets "unknown setting, did you mean rollout.group_size?". The table of
# docs/from_trl_or_verl.md has the same names, with the differences in meaning.
NAMES_ELSEWHERE = {
    "model_name_or_path": "model.path",
    "expert_model_parallel_size": "model.ep_size",
    "bf16": "model.dtype",
    "gradient_checkpointing": "model.activation_checkpointing",
    "enable_gradient_checkpointing": "model.activation_checkpointing",
    "dataset_name": "data.train",
    "train_files": "data.train",
    "val_files": "data.eval",
    "prompt_key": "data.train[].columns",
    "chat_template_kwargs": "data.chat_template_args",
    "apply_chat_template_kwargs": "data.chat_template_args",
    "filter_overlong_prompts": "data.on_bad_row",
    "train_batch_size": "rollout.prompts_per_step",
    "generation_batch_size": "rollout.prompts_per_step",
    "num_generations": "rollout.group_size",
    "n": "rollout.group_size",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "vllm_max_model_length": "rollout.max_prompt_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "tensor_model_parallel_size": "rollout.tensor_parallel",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.kv_cache_gib",
    "vllm_gpu_memory_utilization": "rollout.kv_cache_gib",
    "vllm_enable_sleep_mode": "rollout.sleep_level",
    "free_cache_engine": "rollout.sleep_level",
    "quantization": "rollout.fp8",
    "enable_prefix_caching": "rollout.prefix_caching",
    "reward_funcs": "data.train[].kind",
    "reward_weights": "data.train[].kind",
    "custom_reward_function": "data.train[].kind",
    "overlong_buffer_cfg": "reward.overlong_buffer",
    "filter_groups": "zero_variance.refill",
    "max_num_gen_batches": "zero_variance.max_rounds",
    "beta": "algorithm.kl_coef",
    "use_kl_loss": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_eps_low",
    "epsilon_high": "algorithm.clip_eps_high",
    "clip_ratio": "algorithm.clip_eps_low",
    "clip_ratio_low": "algorithm.clip_eps_low",
    "clip_ratio_high": "algorithm.clip_eps_high",
    "delta": "algorithm.clip_cap",
    "clip_ratio_c": "algorithm.clip_cap",
    "mask_truncated_completions": "algorithm.leave_out_cut",
    "sapo_temperature_pos": "algorithm.gain_args",
    "sapo_temperature_neg": "algorithm.gain_args",
    "off_policy_mask_threshold": "algorithm.gain_args",
    "top_entropy_quantile": "algorithm.select_args",
    "loss_type": "algorithm.loss_agg",
    "loss_agg_mode": "algorithm.loss_agg",
    "loss_mode": "algorithm.ratio_level",
    "importance_sampling_level": "algorithm.ratio_level",
    "scale_rewards": "algorithm.adv_norm",
    "norm_adv_by_std_in_grpo": "algorithm.adv_norm",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction",
    "vllm_importance_sampling_mode": "algorithm.rollout_correction",
    "vllm_importance_sampling_clip_max": "algorithm.rollout_correction_cap",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction_cap",
    "rollout_is": "algorithm.rollout_correction",
    "rollout_is_threshold": "algorithm.rollout_correction_cap",
    "bypass_mode": "algorithm.old_policy",
    "enable_rollout_routing_replay": "algorithm.router_replay",
    "max_steps": "train.num_steps",
    "num_train_epochs": "train.num_steps",
    "total_training_steps": "train.num_steps",
    "total_epochs": "train.num_steps",
    "steps_per_generation": "train.minibatches_per_step",
    "ppo_mini_batch_size": "train.minibatches_per_step",
    "per_device_train_batch_size": "train.micro_batch_tokens",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "train.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "num_iterations": "train.passes_per_rollout",
    "ppo_epochs": "train.passes_per_rollout",
    "balance_batch": "train.balance",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.lr_schedule",
    "lr_scheduler_kwargs": "train.lr_schedule_args",
    "lr_warmup_steps": "train.warmup_steps",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "grad_clip": "train.max_grad_norm",
    "clip_grad": "train.max_grad_norm",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "num_generations_eval": "eval.num_samples",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "resume_mode": "checkpoint.resume",
    "output_dir": "run.dir",
    "default_local_dir": "run.dir",
    "logging_steps": "run.log_every",
    "report_to": "run.trackers",
    "logger": "run.trackers",
}
