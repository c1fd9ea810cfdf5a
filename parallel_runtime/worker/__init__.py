"""The torchrun side: one rank of a worker group.

serve       its life; agent, leash and rendezvous are its torchrun, ranks its place among the others, spread what only
            rank 0 was given
models      the models and VAEs of this rank; vaes runs these, memory is what it holds, link how fast it is
pulse       what a run says and hears, the latents of its steps among it
lanes       prompts and images over groups of ranks; step_cache leaves blocks out, advice looks for faster kernels
engine      networks cut, attention over ranks, forwards recorded
comfy_loop  ComfyUI's own loading and sampling; demo_loop is the demo's, without ComfyUI
weights     where weights are at rest; vae: VAEs over ranks; workbench: a plan's first draft and its check
"""
