"""K/V that one daemon computed and another goes on from: prefill and decode on engines of their own."""
