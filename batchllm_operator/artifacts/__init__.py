"""What stages store in the lake under `_batchllm/`; no other package knows the file formats."""
