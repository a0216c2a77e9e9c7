"""The files of models, adapters and drafts: found, fetched, their headers and digests."""
