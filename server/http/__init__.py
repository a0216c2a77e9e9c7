"""HTTP below the endpoints: connections, bodies, origins and the OpenAPI document. Routes live elsewhere."""
