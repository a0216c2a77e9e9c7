"""The fields of requests, shared by HTTP and the offline API: names, types and ranges."""
