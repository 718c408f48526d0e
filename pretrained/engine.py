"""vLLM completes prompts for pretrained/train.py: in each process an engine, with a copy of the
policy's weights, does the process's share. Needs pretrained/requirements-vllm.txt."""
import logging
import os
import tempfile
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"      # in this process, which has the weights
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # V1 is the one that we have tried
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

import common
from pretrained import models

RELOADING = logging.getLogger("vllm.model_executor.model_loader.reload.inplace")


def refuse(record):
    """Raise what vLLM only warns of: a sync that leaves some weights as they were. A filter of
    logging."""
    raise ValueError(record.getMessage())


def forget_kernels(engine):
    """Let a model of vLLM pack the weights of experts again when it loads them. On a CPU it does
    that only where it makes a kernel for them, and would read the next ones as if packed."""
    for module in engine.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class Engine:
    """vLLM for one policy. A text has `longest` tokens at most, those of its prompt included."""

    def __init__(self, policy, longest):
        cfg = policy.cfg
        self.ends = policy.ends
        self.is_cpu = cfg.device == "cpu"
        is_job = torch.distributed.is_torchelastic_launched()
        experts = ("num_experts", "num_local_experts", "n_routed_experts")
        if self.is_cpu:
            torch.cpu._init_amx()               # vLLM uses these registers without asking for them
            has_experts = any(getattr(policy.model.config, name, 0) for name in experts)
            if has_experts and cfg.lora_rank > 0:
                raise ValueError("on a CPU, vLLM has no adapters for models with experts: leave "
                                 "out --lora_rank, or try --engine transformers")
        self.adapter = None                             # a request that names it, if there is one
        self.scratch = tempfile.TemporaryDirectory()    # where vLLM reads it
        lora = {}
        if cfg.lora_rank > 0:
            ranks = (8, 16, 32, 64, 128, 256, 320, 512)
            lora = {"enable_lora": True, "max_loras": 1,
                    "max_lora_rank": min(rank for rank in ranks if rank >= cfg.lora_rank)}
        memory = {"gpu_memory_utilization": cfg.engine_memory}
        if self.is_cpu:                                 # where it would count what others take
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            memory = {"kv_cache_memory_bytes": int(cfg.engine_memory * total)}
        set_num_threads = torch.set_num_threads         # which vLLM replaces by what does nothing
        self.llm = LLM(
            model=policy.model.config.name_or_path, tokenizer=policy.tokenizer.name_or_path,
            dtype=cfg.dtype, max_model_len=longest, **memory, **lora,
            load_format="dummy",                        # `update` brings the weights
            logprobs_mode="processed_logprobs",         # those of what it samples from
            enforce_eager=self.is_cpu,                  # there it would compile for half a minute
            enable_chunked_prefill=not self.is_cpu,     # there it fails if a row has a seed
            enable_sleep_mode=not self.is_cpu,
            distributed_executor_backend="external_launcher" if is_job else None)
        self.llm.generate([{"prompt_token_ids": [0]}], use_tqdm=False)     # can it do this model?
        torch.set_num_threads = set_num_threads
        RELOADING.setLevel(logging.WARNING)
        RELOADING.addFilter(refuse)
        self.sleep()

    def sleep(self):
        """Leave the memory of a GPU to the trainer; weights come anew before the next sample."""
        if not self.is_cpu:
            self.llm.sleep(level=2)

    def update(self, model):
        """Wake up with the weights of a model, of which each process may have a part. Tied weights
        go by both names, since on a CPU there is a packed copy of each, if vLLM knows both."""
        if self.is_cpu:
            self.llm.apply_model(forget_kernels)
        else:
            self.llm.wake_up(tags=["weights"])
        [has_head] = self.llm.apply_model(lambda engine: hasattr(engine, "lm_head"))
        tied = () if has_head else model.all_tied_weights_keys
        weights = ((name, models.whole(weight))
                   for name, weight in models.frozen_weights(model) if name not in tied)
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except Exception as error:              # vLLM raises nearly anything
            common.fail("--engine vllm: cannot take this model's weights, try --engine "
                        f"transformers: {' '.join(str(error).split())}", code=1)
        if not self.is_cpu:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()           # of keys and values that other weights computed
        self.update_adapter(model)

    def update_adapter(self, model):
        """Give vLLM the adapter as it is. Added to the weights, it would be rounded with them, and
        a small one would vanish in bfloat16."""
        weights = {name: models.whole(weight).detach() for name, weight in model.named_parameters()
                   if "lora_" in name}
        if weights:
            number = self.adapter.lora_int_id + 1 if self.adapter else 1
            folder = Path(self.scratch.name, str(number % 2))
            model.peft_config["default"].save_pretrained(folder)
            save_file({f"base_model.model.{name.replace('.default', '')}": weight.cpu().contiguous()
                       for name, weight in weights.items()}, folder / models.ADAPTER)
            self.adapter = LoRARequest(f"adapter {number}", number, str(folder))

    def complete(self, prompts, completions, T, temperature, seeds):
        """Add tokens to completions of prompts, lists of token ids, in rounds: until an end or a
        call, behind which comes what the task responds. seeds[i, t], (b, T), is that of row i if a
        round begins at its token t."""
        rows = range(len(prompts))
        while rows:
            texts = [{"prompt_token_ids": prompts[i] + completions[i].ids} for i in rows]
            wishes = []
            for i in rows:
                t = len(completions[i].ids)
                calls = list(completions[i].calls)      # to stop there saves time
                wishes.append(SamplingParams(
                    temperature=temperature, seed=seeds[i, t].item(), max_tokens=T - t,
                    stop_token_ids=self.ends, stop=calls, include_stop_str_in_output=True,
                    skip_special_tokens=False, detokenize=bool(calls), logprobs=0,
                    flat_logprobs=True))
            for i, found in zip(rows, self.llm.generate(
                    texts, wishes, use_tqdm=False, lora_request=self.adapter)):
                [sampled] = found.outputs
                entropies = [float("nan")] * T          # vLLM does not tell them
                completions[i].extend(sampled.token_ids, sampled.logprobs.logprobs, entropies, T=T)
            rows = [i for i in rows if not completions[i].has_ended and len(completions[i].ids) < T]
        self.sleep()
