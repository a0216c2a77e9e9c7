"""`quire tune`: finds this machine's settings for a model by timing real steps."""
