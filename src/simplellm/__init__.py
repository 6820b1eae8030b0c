"""The lab's model library: Llama and its pipeline stages, tokenizer, stories, loss."""
