"""What CP Plan says, sentence by sentence, in English; the page has the same in other languages, by the same keys
(locales/*/main.json, cpReport)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

SENTENCES = {
    "model.cut": "{name} ({files}): {layers} layers, {heads} heads, {weights} billion weights in {size} GiB, "
    "computed in {dtype}.",
    "model.whole": "{name} ({files}): {weights} billion weights in {size} GiB, computed in {dtype}.",
    "tokens": "{tokens}; {rows} images or videos in the batch.",
    "tokens.one": "{tokens}; one image or video in the batch.",
    "uncut": "not cut; {rows} images or videos in the batch.",
    "uncut.one": "not cut; one image or video in the batch.",
    "workers": "{count}, on {devices}.",
    "workers.machines": "{count}, on {devices} of each of {machines} machines, which meet at {endpoint}.",
    "degrees": "{degrees}.",
    "degrees.unmeasured": "{degrees}, auto's choice until as many workers have run here and measured.",
    "degrees.measured": "{degrees}, the fastest by what the workers measured.",
    "branches": "Positive and negative prompt run side by side, which exchanges one latent a step.",
    "heads": "Ulysses gives each of {workers} workers {heads} heads.",
    "heads.one": "Ulysses gives each of {workers} workers one head.",
    "heads.or": "Ulysses gives each of {workers} workers {heads} or {more} heads.",
    "heads.shares": "Ulysses gives each of {workers} workers its share of the heads.",
    "shares": "{shares}: tokens in proportion, heads as far as whole heads go.",
    "unlike": "Estimated {seconds} s for an evaluation of all prompts; {others}.",
    "unlike.shares": "the tokens of both by shares {seconds} s",
    "unlike.halves": "a prompt for each half of the workers {seconds} s",
    "unlike.without": "without {device} {seconds} s",
    "unlike.leave": "without {device} {seconds} s: name the others in devices to leave {device} out",
    "unlike.tokens": "all devices, the tokens by shares, {seconds} s",
    "unlike.nowhere": "with all devices the weights have no place",
    "unlike.unmeasured": "Nothing is measured yet; {others}.",
    "unlike.left": "Auto leaves out {devices}: to use all the same, name all devices in CP Parallel Config.",
    "and": "{one}, {other}",
    "stages": "A pipeline: each of {stages} stages has a part of the blocks, and passes the tokens on.",
    "stage": "{number} has blocks {first} to {last} ({work} of the work, {size})",
    "stage.and": "{one}; {other}",
    "stage.all": "{stages}.",
    "stage.one": "one evaluation goes through them: a stage computes {busy} of the time.",
    "stage.several": "{flights} evaluations follow each other through them: a stage computes {busy} of the time.",
    "stage.exact": "Exact.",
    "stage.auto": "Auto's choice: the weights have no other place without being fetched over a slow link.",
    "lane.stage": "stage {stage}/{stages}",
    "lane.images": "images {group}/{groups}",
    "lane.positive": "positive",
    "lane.negative": "negative",
    "stages.patches": "Approximate, not the picture of one GPU: after {warmup} exact step(s) {patches} patches of each "
    "evaluation follow each other through the stages, with keys and values that are one step old. Of these each worker "
    "keeps {kept} GiB.",
    "ring.passes": "The ring passes keys and values between {workers} workers while they compute "
    "(rotate_method alltoall).",
    "ring.collects": "The ring collects keys and values of all {workers} workers before they compute "
    "(rotate_method allgather).",
    "images": "The images of a batch are shared out over {groups} groups of workers.",
    "one.prompt": "At cfg 1 there is one prompt, so all workers share its tokens.",
    "both.parts": "All workers have both prompts, and each keeps a part of the weights.",
    "both.seen": "Something on MODEL sees both prompts at once, so all workers share the tokens of both.",
    "alone": "One worker does everything.",
    "memory": "about {needed} GiB a worker, {held} of it weights; the fullest has {free} GiB free now.",
    "memory.unknown": "about {needed} GiB a worker, {held} of it weights. What is free is known once workers run.",
    "memory.each": "Needed at the peak / free now: {each}.",
    "memory.each.unknown": "Needed at the peak: {each}.",
    "weights.whole": "{mode}, whole on every device.",
    "weights.stages": "each stage has its own blocks alone, and the {outside} that lie outside of blocks.",
    "weights.fetched": "{mode}. Each worker has {resident} of {blocks} blocks, {held} GiB in all; {fetched} GiB come "
    "from main memory in every evaluation.",
    "weights.gathered": "{mode}. Each worker has {resident} of {blocks} blocks, {held} GiB in all; {fetched} GiB come "
    "from {workers} workers in every evaluation.",
    "weights.fetched.each": "{mode}, as the memory of each worker goes; at rest (whole blocks): {each}. Up to "
    "{fetched} GiB come from main memory in every evaluation.",
    "weights.gathered.each": "{mode}, as the memory of each worker goes; at rest (whole blocks): {each}. {fetched} GiB "
    "come from {workers} workers in every evaluation.",
    "weights.why": "Whole they fit on {fitting} only: {device} would need {needed}, and may take {room}.",
    "weights.unmeasured": "How fast is known once workers run.",
    "weights.hidden": "It takes {seconds} s for {prompts} prompts at once, all of it hidden behind computing.",
    "weights.hidden.one": "It takes {seconds} s for one prompt, all of it hidden behind computing.",
    "weights.waits": "It takes {seconds} s for {prompts} prompts at once, {exposed} s of them waiting for weights.",
    "weights.waits.one": "It takes {seconds} s for one prompt, {exposed} s of them waiting for weights.",
    "traffic": "each worker sends {layer} MiB in each of {layers} layers, {evaluation} MiB an evaluation.",
    "traffic.none": "none inside the model.",
    "traffic.stages": "A stage passes {each} MiB on in each evaluation, and the last one gives a latent to all in each "
    "step.",
    "launch.stages": "kernel by kernel: stages of a pipeline wait for each other in the middle of an evaluation.",
    "launch.eager": "kernel by kernel, in every evaluation.",
    "launch.on": "an evaluation is recorded as a CUDA graph, which keeps about {held} GiB more; with compile on it is "
    "the fastest way.",
    "launch.on.compiled": "an evaluation is recorded as a CUDA graph, which keeps about {held} GiB more; compiled and "
    "recorded is the fastest way.",
    "launch.auto": "an evaluation is recorded as a CUDA graph where the CPU would launch it slower than the GPU "
    "computes, which keeps about {held} GiB more; with compile on it is the fastest way.",
    "launch.auto.compiled": "an evaluation is recorded as a CUDA graph where the CPU would launch it slower than the "
    "GPU computes, which keeps about {held} GiB more; compiled and recorded is the fastest way.",
    "kernel.time": "{name} with {time} us",
    "kernel.own": "ComfyUI's own with {time} us",
    "kernel.ring": "{fastest}, for the ring's blocks of {block}.",
    "kernel.ring.before": "{fastest}, before {others}, for the ring's blocks of {block}.",
    "kernel.whole": "{fastest}, for whole keys, {block}.",
    "kernel.whole.before": "{fastest}, before {others}, for whole keys, {block}.",
    "kernel.advice": "ComfyUI's own, with {own} us for {block}. {fastest} takes {time} us: set attention_backend to "
    "{fastest} in CP Parallel Config to have it; its rounding is another.",
    "decode": "about {here} GiB in ComfyUI's process beside {weights} of weights, {share} on each of {workers} "
    "worker(s) with CP VAE.",
    "decode.seconds": "{alone} s on one device, {several} s divided, at the measured speeds.",
    "decode.whole": "in ComfyUI's process; CP VAE would not divide it: {reason}.",
    "decode.dims": "this VAE takes latents of {wanted} dims; the sampler's has {found}.",
    "vae.foreign": "it is a {kind}, which is not ComfyUI's own",
    "vae.unknown": "{kind} is none of the VAEs that were compared with one process",
    "vae.sound": "audio has no rows to share out",
    "vae.patched": "it is patched; take the patch away, or merge it into the file",
    "speed": "one evaluation of one prompt is estimated {times} times as fast as on one worker, at the measured {link} "
    "GB/s and {flops} TFLOP/s.",
    "speed.lanes": "one evaluation of one prompt is estimated {times} times as fast as on one worker, and {lanes} run "
    "side by side, at the measured {link} GB/s and {flops} TFLOP/s.",
    "note.memory": "Too little memory: set weights to auto, take more workers, or make a smaller picture.",
    "note.rows": "There is no room for several prompts at once: they are evaluated one after the other.",
    "note.uneven": "{heads} heads over ulysses_degree {ulysses} is uneven: some workers wait for others. It is exact "
    "all the same; a divisor of the heads is faster.",
    "note.cores": "{workers} workers share the {cores} CPU cores here: exact, but hardly faster.",
    "note.twice": "A GPU is named twice: exact, but slower than naming it once.",
    "untried.machines": "Several machines with GPUs have not been tried on hardware yet, only one H100 has: see "
    "docs/devices.md.",
    "untried.kind": "Devices of the kind {kind} have not been tried on hardware yet, only one H100 has: see "
    "docs/devices.md.",
    "untried.several": "Several GPUs at once have not been tried on hardware yet, only one H100 has: see "
    "docs/devices.md.",
    "note.stages": "Stages stand still {idle} of the time: a pipeline is for weights that fit nowhere else and for "
    "slow links. Where cards are linked well, Ulysses and ring are faster.",
    "note.unused": "shares {shares} divide nothing here: each worker of {name} has a prompt of its own. CP VAE goes by "
    "them, and so does data_degree.",
    "note.workless": "Nothing is left for {devices}, which waits for the others all the same: leave it out of devices, "
    "and out of shares.",
    "note.unfetched": "weights {weights}: {name} has no blocks to fetch, so it is whole on every device.",
    "note.alone": "weights {weights}: one worker has nobody to share with, so {name} is whole.",
    "note.alone.each": "weights {weights}: one worker has nobody to share with, so {name} is whole on each; set "
    "cfg_degree and data_degree to 1, and all workers share it.",
    "trouble.model": "This MODEL cannot run in the workers: {reason}",
    "trouble.config": "The CP Parallel Config cannot work: {reason}.",
    "trouble.weights": "Its weights have no place: {reason}.",
    "instead": "With {setting}:",
    "set": "{name} {value}",
    "set.auto": "{name} on auto",
    "note.halves": "Each half of the workers has its own copy of the weights: cfg_degree 1 would need less.",
    "note.branches": "With cfg above 1, cfg_degree 2 would exchange less: leave the degrees at 0, or set it.",
    "note.together": "Something on MODEL sees all images and prompts at once, so data_degree {data} gains nothing: "
    "each group of workers does all of the work.",
    "note.undivided": "{name} can share out prompts and images only: some workers have nothing to do.",
    "note.idle": "data_degree {data} with {rows} in the batch leaves workers idle: set data_degree to {rows} and give "
    "the rest to the ring or Ulysses degree.",
}


class Said(str):
    """One of SENTENCES, in English, which knows what it says: for other languages."""

    key: str
    values: dict[str, Any]


def say(key: str, **values: Any) -> Said:
    """`values` as they are to be read, sentences among them."""
    said = Said(SENTENCES[key].format(**values))
    said.key, said.values = key, values
    return said


def listed(sentences: Sequence[Said], key: str = "and") -> Said:
    """One after the other, as `key` joins two."""
    return reduce(lambda one, other: say(key, one=one, other=other), sentences)


def for_page(sentence: str) -> str | list[Any]:
    """Key, values and English of what is Said, or else the text."""
    if not isinstance(sentence, Said):
        return sentence
    values = {name: for_page(value) if isinstance(value, str) else value for name, value in sentence.values.items()}
    return [sentence.key, values, str(sentence)]
