"""The sample store of a stream: bounded on the disk, safe when a process is killed."""
