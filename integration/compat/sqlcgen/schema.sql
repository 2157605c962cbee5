create table authors (
  id bigint generated always as identity primary key,
  name text not null unique,
  backend integer not null default pg_backend_pid()
);
