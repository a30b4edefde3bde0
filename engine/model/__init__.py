"""Weights, decoder, attention, sampler, tokenizer."""
