"""The lab's parallel library: runtime, traffic, data parallelism."""
