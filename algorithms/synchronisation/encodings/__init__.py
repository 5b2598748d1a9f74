"""Encodings of what workers send: reduced precision, quantisation, sparsification."""
