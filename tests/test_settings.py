"""engines/settings.py prints settings that TRL and verl accept, and that mean the same."""
import json
import re
import shlex

import pytest
from small_models import NEEDS

import common
import dpo
import engines
import grpo
import gspo
import plumbing
from engines import here, settings
from examples import zoo


def printed(folder, script, capsys, **flags):
    """The lines for a run with these flags. -> {first word: words of a line}, whole text"""
    cfg = script.Config(device="cpu", **flags)
    folder.mkdir(exist_ok=True)
    name = script.__name__.rpartition(".")[2]
    content = {"script": f"{name}.py", "config": common.dataclasses.asdict(cfg)}
    plumbing.write(folder / "config.json", json.dumps(content))
    assert plumbing.read_config(folder)[0] == f"{name}.py"
    capsys.readouterr()
    settings.main([str(folder)])
    text = capsys.readouterr().out
    lines = [shlex.split(line) for line in text.splitlines() if line and line[0] != "#"]
    return lines, text


def values(words):
    flags = [i for i, word in enumerate(words) if word.startswith("--")]
    return {words[i][2:]: words[i + 1] for i in flags}


RUNS = [(grpo, {}), (grpo, {"loss_type": "dapo", "beta": 0.1, "kl_estimator": "k3_ratio"}),
        (grpo, {"loss_type": "dr_grpo", "scale_rewards": "none", "num_mini_batches": 3}),
        (grpo, {"delta": 2.0, "max_grad_norm": 0.0, "num_iterations": 2}),
        (grpo, {"loss_type": "cispo", "mask_truncated_completions": True, "entropy_coef": 0.1}),
        (gspo, {"epsilon": 1e-3}), (zoo, {"loss_type": "gmpo", "gmpo_epsilon": 0.3}),
        (zoo, {"loss_type": "vespo"}), (zoo, {"loss_type": "clip_cov"}),
        (zoo, {"loss_type": "sapo"}), (here, {"loss": "gspo epsilon=0.1 how=token_mean"})]


@pytest.mark.parametrize("script, flags", RUNS)
def test_the_loss_of_the_run_is_read_back_with_its_average(script, flags, tmp_path, capsys):
    lines, _ = printed(tmp_path / "a b", script, capsys, **flags)
    [words] = [line for line in lines if "engines.trl" in line]
    text = " ".join(word for word in words[3:words.index("--learning_rate")])
    loss, how = engines.load(text)
    if script is not here:
        assert how == script.LOSS_TYPES[script.Config(**flags).loss_type][1]
    for name in ("epsilon", "gmpo_epsilon", "delta"):
        if name in flags:
            assert f"{name}={flags[name]}" in text.split()
    assert values(words)["output_dir"] == f"{tmp_path}/a b-trl"
    [verl] = [line for line in lines if "verl.trainer.main_ppo" in line]
    assert f"LOSS={text}" in verl


@pytest.mark.parametrize("script, flags", RUNS)
def test_trl_accepts_the_flags_and_counts_the_same_steps(script, flags, tmp_path, capsys):
    trl = pytest.importorskip("trl", reason=NEEDS)
    lines, _ = printed(tmp_path / "run", script, capsys, **flags)
    [words] = [line for line in lines if "engines.trl" in line]
    own = next((line for line in lines if line[0] == "--loss_type"), [])
    parser = trl.TrlParser((trl.GRPOConfig,))
    chosen = [word for name, x in values(words).items() for word in (f"--{name}", x)
              if name not in ("model_name_or_path", "dataset_name", "reward_funcs")]
    [args] = parser.parse_args_and_config([*chosen, *own, "--use_cpu"])
    cfg = script.Config(device="cpu", **flags)
    rows = cfg.num_prompts // cfg.num_mini_batches * cfg.num_generations
    size = args.per_device_train_batch_size
    assert size * args.gradient_accumulation_steps == rows
    assert size * args.steps_per_generation == rows * cfg.num_mini_batches
    assert args.max_steps == cfg.max_steps * cfg.num_iterations * cfg.num_mini_batches
    assert args.use_bias_correction_kl == (cfg.kl_estimator == "k3_ratio")
    for name in ("learning_rate", "beta", "entropy_coef", "temperature", "scale_rewards",
                 "mask_truncated_completions", "num_iterations"):
        assert getattr(args, name) == getattr(cfg, name)
    if own:
        assert (args.epsilon_high or args.epsilon) == pytest.approx(
            cfg.epsilon_high + (cfg.loss_type == "cispo")) or cfg.loss_type == "vespo"
        assert args.importance_sampling_level == ("sequence" if script is gspo else "token")


def test_verl_has_all_keys_of_the_command(tmp_path, capsys):
    pytest.importorskip("verl", reason="needs lab/conform/requirements.txt")
    hydra = pytest.importorskip("hydra")
    import verl.trainer
    lines, _ = printed(tmp_path / "run", grpo, capsys, beta=0.1, loss_type="dr_grpo")
    [words] = [line for line in lines if "verl.trainer.main_ppo" in line]
    keys = [word for word in words if re.match(r"[a-z_]+\.", word) and "=" in word]
    with hydra.initialize_config_dir(f"{verl.trainer.__path__[0]}/config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=keys)   # raises if a key does not exist
    actor = config.actor_rollout_ref.actor
    assert actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor == 48
    assert actor.policy_loss.loss_mode == config.algorithm.adv_estimator == "ours"
    assert actor.kl_loss_coef == 0.1 and actor.use_kl_loss and actor.ppo_mini_batch_size == 16


@pytest.mark.parametrize("script, flags, lost", [
    (grpo, {"dynamic_sampling": 2, "overlong_buffer": 8}, ["--dynamic_sampling 2",
                                                          "--overlong_buffer 8"]),
    (grpo, {"scale_rewards": "mean"}, ["--scale_rewards mean"]),
    (grpo, {"num_mini_batches": 3}, ["30 prompts in a batch"]),
    (grpo, {"beta": 0.1, "kl_estimator": "k2"}, ["--kl_estimator k2"]),
    (zoo, {"advantage": "passk"}, ["--advantage passk"]),
    (dpo, {"nll_coef": 0.5, "label_smoothing": 0.1}, ["--nll_coef 0.5", "--label_smoothing"]),
    (dpo, {"loss_type": "ipo", "beta": 0.5}, ["--loss_type ipo"])])
def test_what_has_no_counterpart_is_listed(script, flags, lost, tmp_path, capsys):
    _, text = printed(tmp_path / "run", script, capsys, **flags)
    first = text.splitlines()[0]
    assert first.startswith("#") and all(one in first for one in lost)


def test_trl_accepts_the_flags_of_dpo(tmp_path, capsys):
    trl = pytest.importorskip("trl", reason=NEEDS)
    lines, _ = printed(tmp_path / "run", dpo, capsys, loss_type="hinge")
    chosen = [word for name, x in values(lines[0]).items() for word in (f"--{name}", x)
              if name not in ("model_name_or_path", "dataset_name")]
    [args] = trl.TrlParser((trl.DPOConfig,)).parse_args_and_config(
        [*chosen, "--output_dir", "out", "--use_cpu"])
    assert args.beta == 0.1 and args.max_steps == 60 and args.per_device_train_batch_size == 64


def test_a_run_of_another_script_is_refused(tmp_path, refused):
    plumbing.write(tmp_path / "config.json", json.dumps({"script": "ppo.py", "config": {}}))
    refused("is a run of ppo.py, for which TRL and verl have no settings", settings.main,
            [str(tmp_path)])


def test_there_are_no_more_mini_batches_than_prompts_and_parts_are_as_large_as_they_may_be():
    c = {"num_mini_batches": 8, "num_prompts": 3, "num_generations": 6, "micro_batch_size": 4}
    assert settings.sizes(c) == (3, 6, 3)
    assert settings.sizes(c | {"num_mini_batches": 2, "num_prompts": 4}) == (2, 12, 4)
