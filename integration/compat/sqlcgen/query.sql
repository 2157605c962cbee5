-- name: CreateAuthor :one
insert into authors (name) values ($1) returning *;

-- name: GetAuthor :one
select * from authors where id = $1;

-- name: ListAuthors :many
select * from authors where id = any($1::bigint[]) order by id;

-- name: RenameAuthor :exec
update authors set name = $2 where id = $1;

-- name: SlowAuthor :one
select count(*) from authors, pg_sleep(60);
