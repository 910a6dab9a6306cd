{{/* The rules of alerts/*.yaml, each file a template of one alert, or of nothing if it doesn't apply. */}}
{{- define "batchllm.alerts" -}}
{{- $alerts := .Values.monitoring.alerts -}}
{{- $url := required "monitoring.alerts.runbookBaseUrl: give the folder of the runbooks" $alerts.runbookBaseUrl -}}
{{- range $alerts.disabled }}
{{- if not ($.Files.Get (printf "alerts/%s.yaml" .)) }}
{{- fail (printf "monitoring.alerts.disabled: there is no alert %s" .) }}
{{- end }}
{{- end }}
{{- range $path, $content := .Files.Glob "alerts/*.yaml" }}
{{- $alert := trimSuffix ".yaml" (base $path) }}
{{- if not (has $alert $alerts.disabled) }}
{{- $rule := tpl (toString $content) $ | fromYaml }}
{{- if hasKey $rule "Error" }}
{{- fail (printf "%s: %s" $path $rule.Error) }}
{{- end }}
{{- if $rule }}
{{- $_ := set $rule.annotations "runbook_url" (printf "%s/%s.md" (trimSuffix "/" $url) $alert) }}
{{ list $rule | toYaml }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Label matchers for the release's pods. Labels of pods aren't in kube-state-metrics by default, names are. */}}
{{- define "batchllm.podMatchers" -}}
namespace={{ .Release.Namespace | quote }},pod=~{{ .Values.monitoring.alerts.podPattern | quote }}
{{- end -}}
