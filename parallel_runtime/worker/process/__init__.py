"""Parts of a worker that do not depend on the job: torchrun, the end with the host, progress, memory, speeds."""
