"""Sample completions for pretrained/train.py with vLLM, if they are too long or too many for
transformers. Each process has an engine with a copy of the policy's weights, which does the share
of that process. Needs pretrained/requirements-vllm.txt."""
import logging
import os
import tempfile
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"      # in this process, near the weights
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # we have only tried V1
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

import common
from pretrained import models

RELOADING = logging.getLogger("vllm.model_executor.model_loader.reload.inplace")


def refuse(record):
    """Raise an error if a sync left some weights unchanged, because vLLM only logs a warning. A
    filter of logging."""
    raise ValueError(record.getMessage())


class Engine:
    """vLLM for one policy. Prompt and completion together have at most `longest` tokens."""

    def __init__(self, policy, longest):
        cfg = policy.cfg
        self.ends = policy.ends
        self.is_cpu = cfg.device == "cpu"
        if self.is_cpu:
            torch.cpu._init_amx()               # vLLM uses these registers without requesting them
        self.adapter = None                             # vLLM's request for the latest adapter
        self.scratch = tempfile.TemporaryDirectory()    # vLLM reads the adapter from this folder
        lora = {}
        if cfg.lora_rank > 0:
            ranks = (8, 16, 32, 64, 128, 256, 320, 512)
            lora = {"enable_lora": True, "max_loras": 1,
                    "max_lora_rank": min(rank for rank in ranks if rank >= cfg.lora_rank)}
        memory = {"gpu_memory_utilization": cfg.engine_memory}
        if self.is_cpu:                 # a share would also count the memory of other programs
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            memory = {"kv_cache_memory_bytes": int(cfg.engine_memory * total)}
        is_torchrun = torch.distributed.is_torchelastic_launched()
        set_num_threads = torch.set_num_threads         # vLLM replaces it by a dummy
        self.llm = LLM(
            model=policy.model.config.name_or_path, tokenizer=policy.tokenizer.name_or_path,
            dtype=cfg.dtype, max_model_len=longest, **memory, **lora,
            load_format="dummy",                        # random weights until `update`
            logprobs_mode="processed_logprobs",         # after the temperature
            enforce_eager=self.is_cpu,                  # compiling takes half a minute
            enable_chunked_prefill=not self.is_cpu,     # on a CPU it fails if a row has a seed
            enable_sleep_mode=not self.is_cpu,
            distributed_executor_backend="external_launcher" if is_torchrun else None)
        # some models load, but fail when they run
        self.llm.generate([{"prompt_token_ids": [0]}], use_tqdm=False)
        torch.set_num_threads = set_num_threads
        RELOADING.setLevel(logging.WARNING)
        RELOADING.addFilter(refuse)
        self.sleep()

    def sleep(self):
        """Free the memory of a GPU for the trainer. `update` brings the weights again."""
        if not self.is_cpu:
            self.llm.sleep(level=2)

    def update(self, model):
        """Wake up and take over the weights of a model. Tied weights are sent by both names if vLLM
        knows both, because on a CPU it packs each."""
        if not self.is_cpu:
            self.llm.wake_up(tags=["weights"])
        [has_head] = self.llm.apply_model(lambda engine: hasattr(engine, "lm_head"))
        tied = () if has_head else model.all_tied_weights_keys
        weights = (pair for pair in models.frozen_weights(model) if pair[0] not in tied)
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except Exception as error:              # vLLM raises nearly anything
            common.fail("--engine vllm: cannot take over this model's weights: "
                        f"{models.one_line(error)}; try --engine transformers", code=1)
        if not self.is_cpu:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()           # its keys and values come from older weights
        self.update_adapter(model)

    def update_adapter(self, model):
        """Give vLLM the adapter itself. If it were added to the weights, the sum would be rounded,
        and a small adapter would vanish in bfloat16."""
        weights = {name: weight.detach() for name, weight in model.named_parameters()
                   if "lora_" in name}
        if weights:
            number = self.adapter.lora_int_id + 1 if self.adapter else 1
            folder = Path(self.scratch.name, str(number % 2))
            model.peft_config["default"].save_pretrained(folder)
            save_file({f"base_model.model.{name.replace('.default', '')}": weight.cpu().contiguous()
                       for name, weight in weights.items()}, folder / models.ADAPTER)
            self.adapter = LoRARequest(f"adapter {number}", number, str(folder))

    def complete(self, prompts, completions, T, temperature, seeds):
        """Add tokens to the completions of prompts, which are lists of token ids. In each round a
        row continues to an end token or a call. After a call the task's response is inserted, and
        the row needs another round. seeds[i, t] (b, T) seeds the round of row i from token t."""
        rows = range(len(prompts))
        while rows:
            texts = [{"prompt_token_ids": prompts[i] + completions[i].ids} for i in rows]
            params = []
            for i in rows:
                t = len(completions[i].ids)
                calls = list(completions[i].calls)      # stop at calls to save time
                params.append(SamplingParams(
                    temperature=temperature, seed=seeds[i, t].item(), max_tokens=T - t,
                    stop_token_ids=self.ends, stop=calls, include_stop_str_in_output=True,
                    skip_special_tokens=False, detokenize=bool(calls), logprobs=0,
                    flat_logprobs=True))
            results = self.llm.generate(texts, params, use_tqdm=False, lora_request=self.adapter)
            for i, result in zip(rows, results):
                [sampled] = result.outputs
                logps = sampled.logprobs.logprobs
                entropies = [-logp for logp in logps]   # estimates: vLLM reports none
                completions[i].extend(sampled.token_ids, logps, entropies, T=T)
            rows = [i for i in rows if not completions[i].has_ended and len(completions[i].ids) < T]
        self.sleep()
