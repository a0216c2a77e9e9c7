"""Quire's other endpoints: health, tokens, adapters, request states and the page; pinned prefixes, hand-over."""
