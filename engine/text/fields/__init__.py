"""The fields of requests, for HTTP and the offline API."""
