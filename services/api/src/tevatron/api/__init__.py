"""REST, events, dispatcher and reaper. Knows Postgres and the broker, never torch."""
